-- A process says that it is there, and hears whether it is asked to drain.
-- KEYS 1 workers, 2 worker, 3 clock
-- ARGV 1 worker id, 2 TTL ms, 3 gap ms, 4 ms after which a silent process is forgotten, 5.. fields of the record
-- Returns 1 when asked to drain.
local now = now_ms()
steady_since(KEYS[3], now, tonumber(ARGV[3]), true)
local record = {'HSET', KEYS[2]}
for i = 5, #ARGV do record[#record + 1] = ARGV[i] end
redis.call(unpack(record))
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('ZADD', KEYS[1], whole(now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now - tonumber(ARGV[4])))
return redis.call('HGET', KEYS[2], 'drain') == '1' and 1 or 0
