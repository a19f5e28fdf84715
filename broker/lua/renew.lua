-- Extends leases by making their entries young again. Fenced by owner and attempt. A job whose gateway is gone ends here.
-- KEYS 1 stream, 2 ready, 3 clock, 4 workers
-- ARGV 1 group, 2 gap ms, 3 orphan ms, 4 req TTL ms, then per lease: owner, entry id, req key, job key, attempt,
--      gateway id
-- Returns 1 or 0 per lease; 0 means it is lost.
local now, orphan_ms, answers = now_ms(), tonumber(ARGV[3]), {}
local is_steady = now - steady_since(KEYS[3], now, tonumber(ARGV[2]), false) >= orphan_ms
for i = 5, #ARGV, 6 do
  local owner, entry, req, gateway_id = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 5]
  local is_kept = holds(KEYS[1], ARGV[1], owner, entry, req, ARGV[i + 4])
  if is_kept and is_gone(KEYS[4], gateway_id, now, is_steady, orphan_ms) then
    remove(KEYS[1], KEYS[2], ARGV[1], entry, req, ARGV[4], 'orphaned', 'gateway ' .. gateway_id .. ' is gone')
    redis.call('UNLINK', ARGV[i + 3])
    is_kept = false
  end
  if is_kept then redis.call('XCLAIM', KEYS[1], ARGV[1], owner, 0, entry, 'JUSTID') end
  answers[#answers + 1] = is_kept and 1 or 0
end
return answers
