-- A worker that ends takes its name out of the group. Fenced: one that still holds jobs keeps its name, so nothing
-- pending is ever deleted.
-- KEYS 1 stream
-- ARGV 1 group, 2 owner
-- Returns 1 when the name is gone, or 0 when it holds jobs.
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
