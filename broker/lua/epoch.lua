-- The random mark of this data set; whoever finds none sets it. Another one than before: data was lost.
-- KEYS 1 epoch
-- ARGV 1 a fresh random mark
local known = redis.call('GET', KEYS[1])
if known then return known end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
