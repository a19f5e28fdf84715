-- Asks a `pdq up` for other numbers of processes; it reads them within a second.
-- KEYS 1 scale, 2 up:<name>
-- ARGV 1 name, 2 wish as it was read, 3 wish
-- Returns the wish in force, or '' when there is no such `pdq up`. Somebody else's newer wish stays.
if redis.call('EXISTS', KEYS[2]) == 0 then return '' end
local known = redis.call('HGET', KEYS[1], ARGV[1])
if not known then return '' end
if known ~= ARGV[2] then return known end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return ARGV[3]
