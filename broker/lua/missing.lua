-- Which requests Redis knows nothing of.
-- KEYS 1 any key of the model (names the slot)
-- ARGV req keys
-- Returns 1 per missing key, else 0.
local answers = {}
for i, req in ipairs(ARGV) do answers[i] = 1 - redis.call('EXISTS', req) end
return answers
