-- Live processes.
-- KEYS 1 workers, 2 clock
-- ARGV 1 key prefix, 2 TTL ms, 3 gap ms
-- Returns {ms since Redis began to answer without a gap, {flat record, ...}}; worker:<id> hashes are read.
local now = now_ms()
local records = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], whole(now - tonumber(ARGV[2])), '+inf')) do
  local record = redis.call('HGETALL', ARGV[1] .. 'worker:' .. id)
  if #record > 0 then records[#records + 1] = record end
end
return {whole(now - steady_since(KEYS[2], now, tonumber(ARGV[3]), false)), records}
