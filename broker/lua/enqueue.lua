-- Adds a job once per (request id, gen); a cancelled one is not queued (cancel beats enqueue).
-- KEYS 1 stream, 2 ready, 3 req, 4 job, 5 tenants, 6 clock
-- ARGV 1 payload, 2 ms from arrival to due, 3 ms from arrival to the deadline, 4 tenant, 5 ms that this job moves its
--      tenant's virtual time, 6 most ms that this time may run ahead, 7 group, 8 failures so far,
--      9.. fields of the stream entry
-- Returns {1, entry id} or {0, ''}. SET is the first write, so a full Redis refuses before anything is written.
local known = redis.call('HMGET', KEYS[3], 'state', 'entry')
if known[1] == 'cancelled' then return {0, ''} end
if known[1] then return {1, known[2] or ''} end
local now = now_ms()
redis.call('SET', KEYS[4], ARGV[1])

local start = now
if ARGV[4] ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', whole(now))
  local virtual = tonumber(redis.call('ZSCORE', KEYS[5], ARGV[4]) or now)
  start = math.min(math.max(now, virtual), now + tonumber(ARGV[6]))
  redis.call('ZADD', KEYS[5], whole(start + tonumber(ARGV[5])), ARGV[4])
end
-- The decimals of due are the order of arrival within one millisecond.
local due = string.format('%.3f', start + tonumber(ARGV[2]) + redis.call('HINCRBY', KEYS[6], 'arrivals', 1) % 1000 / 1000)
local deadline = whole(now + tonumber(ARGV[3]))

local entry = {'XADD', KEYS[1], '*'}
for i = 9, #ARGV do entry[#entry + 1] = ARGV[i] end
for _, field in ipairs({'v', ENTRY_VERSION, 'due', due, 'deadline', deadline}) do entry[#entry + 1] = field end
local is_first = redis.call('EXISTS', KEYS[1]) == 0
local id = redis.call(unpack(entry))
if is_first then redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[7], '0') end -- XPENDING answers before any worker came
redis.call('HSET', KEYS[3], 'state', 'queued', 'attempt', '0', 'failures', ARGV[8], 'causes', '', 'worker', '',
  'decode', '', 'reason', '', 'entry', id, 'enqueued', whole(now), 'due', due, 'deadline', deadline)
redis.call('ZADD', KEYS[2], due, id)
return {1, id}
