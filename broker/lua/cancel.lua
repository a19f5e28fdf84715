-- Ends a job in whatever state it is; before its enqueue it leaves a tombstone that the enqueue will meet.
-- KEYS 1 stream, 2 ready, 3 req, 4 job
-- ARGV 1 group, 2 req TTL ms
-- Returns the worker that holds it, or '' when nobody does (queued, unknown, or ended before).
local known = redis.call('HMGET', KEYS[3], 'state', 'entry', 'worker')
local state, entry = known[1] or '', known[2]
if state ~= '' and state ~= 'queued' and state ~= 'prefill' then return '' end
if entry then
  remove(KEYS[1], KEYS[2], ARGV[1], entry, KEYS[3], ARGV[2], 'cancelled', '')
  redis.call('UNLINK', KEYS[4])
else
  redis.call('HSET', KEYS[3], 'state', 'cancelled', 'settled', whole(now_ms()))
  redis.call('PEXPIRE', KEYS[3], ARGV[2])
end
return state == 'prefill' and known[3] or ''
