-- Asks a process to drain; it reads the field at its next heartbeat. Whoever keeps it running wants one less from now
-- on, in the same instant: so it is not started again, and nobody else has to go.
-- KEYS 1 worker, 2 scale
-- ARGV 1 row of the `pdq up` that shall want one less, or '', 2 role
-- Returns 1, or 0 when there is no such process.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local is_new = redis.call('HGET', KEYS[1], 'drain') ~= '1'
redis.call('HSET', KEYS[1], 'drain', '1')
local wish = is_new and ARGV[1] ~= '' and redis.call('HGET', KEYS[2], ARGV[1])
if wish then
  local less = string.gsub(wish, ARGV[2] .. '=(%d+)', function(number)
    return ARGV[2] .. '=' .. whole(math.max(0, tonumber(number) - 1))
  end)
  redis.call('HSET', KEYS[2], ARGV[1], less)
end
return 1
