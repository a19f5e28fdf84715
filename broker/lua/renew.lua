-- Extends leases by making their entries young again. Fenced by owner and attempt.
-- KEYS 1 stream
-- ARGV 1 group, then per lease: owner, entry id, req key, attempt
-- Returns 1 or 0 per lease; 0 means it is lost.
local answers = {}
for i = 2, #ARGV, 4 do
  local owner, entry = ARGV[i], ARGV[i + 1]
  local is_ours = holds(KEYS[1], ARGV[1], owner, entry, ARGV[i + 2], ARGV[i + 3])
  if is_ours then redis.call('XCLAIM', KEYS[1], ARGV[1], owner, 0, entry, 'JUSTID') end
  answers[#answers + 1] = is_ours and 1 or 0
end
return answers
