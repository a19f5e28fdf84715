-- Puts back what `owner` holds in Redis without knowing it (a take whose reply was lost). Does not count as a failure.
-- KEYS 1 stream, 2 ready, 3 wake
-- ARGV 1 group, 2 owner, 3 key prefix, 4 most entries, 5.. entry ids to keep
-- Returns how many went back.
local keep, count = {}, 0
for i = 5, #ARGV do keep[ARGV[i]] = true end
for _, pending in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[4], ARGV[2])) do
  local entry = pending[1]
  local fields = not keep[entry] and fields_of(KEYS[1], entry)
  if fields then
    put_back(KEYS[1], KEYS[2], ARGV[1], entry, fields['due'], req_key(ARGV[3], fields), 'reply lost')
    count = count + 1
  end
end
if count > 0 then wake_workers(KEYS[3], 'given back') end
return count
