-- Deletes one dead letter, and its payload unless somebody queued the same request again.
-- KEYS 1 dead, 2 req, 3 job
-- ARGV 1 entry id of the letter
-- Returns 1, or 0 when there is no such letter.
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
local state = redis.call('HGET', KEYS[2], 'state')
if state ~= 'queued' and state ~= 'prefill' then redis.call('UNLINK', KEYS[3]) end
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('UNLINK', KEYS[1]) end
return 1
