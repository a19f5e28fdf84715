-- How much there is to do.
-- KEYS 1 stream, 2 ready, 3 dead
-- ARGV 1 group, 2 most entries looked at
-- Returns {queued, running, dead, ms that the oldest queued job has waited}. The oldest is looked for among the first
-- entries of the stream; when all of these are running, the next one to be taken stands for it.
local running = redis.call('XPENDING', KEYS[1], ARGV[1])[1]
local now, oldest = now_ms(), redis.call('ZRANGE', KEYS[2], 0, 0)[1]
if oldest then
  for _, found in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[2])) do
    if redis.call('ZSCORE', KEYS[2], found[1]) then
      oldest = found[1]
      break
    end
  end
end
local wait = oldest and now - tonumber(string.match(oldest, '^(%d+)')) or 0
return {redis.call('ZCARD', KEYS[2]), running, redis.call('XLEN', KEYS[3]), whole(wait)}
