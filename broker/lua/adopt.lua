-- Queues what is nobody's: entries neither ready nor leased, put in by hand or left when their group was deleted. The
-- next take judges them.
-- KEYS 1 stream, 2 ready, 3 wake
-- ARGV 1 group, 2 key prefix, 3 first entry to look at, 4 most entries looked at
-- Returns {where to look next ('' when all was seen), how many were queued}. Looks only when there is one to be found:
-- every script leaves each entry either ready or leased.
local num_leased = tonumber(redis.call('XPENDING', KEYS[1], ARGV[1])[1])
if redis.call('XLEN', KEYS[1]) <= redis.call('ZCARD', KEYS[2]) + num_leased then return {'', 0} end
local found, count = redis.call('XRANGE', KEYS[1], ARGV[3], '+', 'COUNT', ARGV[4]), 0
for _, pair in ipairs(found) do
  local entry = pair[1]
  if not redis.call('ZSCORE', KEYS[2], entry) and #redis.call('XPENDING', KEYS[1], ARGV[1], entry, entry, 1) == 0 then
    local fields, problem = fields_of(KEYS[1], entry)
    local req = req_key(ARGV[2], fields)
    if problem or redis.call('EXISTS', req) == 0 then
      redis.call('ZADD', KEYS[2], whole(now_ms()), entry)
    else
      put_back(KEYS[1], KEYS[2], ARGV[1], entry, fields['due'], req, 'was nobody\'s')
    end
    count = count + 1
  end
end
if count > 0 then wake_workers(KEYS[3], 'adopted') end
return {#found == tonumber(ARGV[4]) and '(' .. found[#found][1] or '', count}
