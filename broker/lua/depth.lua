-- How much there is to do.
-- KEYS 1 stream, 2 ready, 3 dead
-- ARGV 1 group, 2 most entries looked at
-- Returns {queued, running, dead, ms that the oldest queued job has waited, tokens queued, tokens running}. Looked at
-- are the first entries of the stream; of a longer one the tokens are estimated by their average. When all that were
-- looked at are running, the next one to be taken stands for the oldest.
local running, queued = tonumber(redis.call('XPENDING', KEYS[1], ARGV[1])[1]), redis.call('ZCARD', KEYS[2])
local oldest, tokens, num_seen = nil, {ready = 0, running = 0}, {ready = 0, running = 0}
for _, found in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[2])) do
  local state = redis.call('ZSCORE', KEYS[2], found[1]) and 'ready' or 'running'
  if state == 'ready' and not oldest then oldest = found[1] end
  tokens[state] = tokens[state] + tonumber(pairs_of(found[2])['tokens'] or 0)
  num_seen[state] = num_seen[state] + 1
end
oldest = oldest or redis.call('ZRANGE', KEYS[2], 0, 0)[1]
local wait = oldest and now_ms() - tonumber(string.match(oldest, '^(%d+)')) or 0

local average = (tokens.ready + tokens.running) / math.max(1, num_seen.ready + num_seen.running)
local function estimated(state, number)
  return whole(tokens[state] + math.max(0, number - num_seen[state]) * average)
end
return {queued, running, redis.call('XLEN', KEYS[3]), whole(wait), estimated('ready', queued),
  estimated('running', running)}
