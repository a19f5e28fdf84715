-- Asks a process to drain; it reads the field at its next heartbeat.
-- KEYS 1 worker
-- Returns 1, or 0 when there is no such process.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'drain', '1')
return 1
