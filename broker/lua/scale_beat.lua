-- A `pdq up` says what it runs, and hears how much it shall run.
-- KEYS 1 scale, 2 up:<name>
-- ARGV 1 key prefix, 2 name, 3 its own wish: in force when nobody has another, 4 1 when it has just started: its own
--      wish wins, 5 TTL ms, 6.. fields of its state
-- Returns the wish in force. Rows of others that are silent are dropped: they bring their wish again when they are back.
local state = {'HSET', KEYS[2]}
for i = 6, #ARGV do state[#state + 1] = ARGV[i] end
redis.call(unpack(state))
redis.call('PEXPIRE', KEYS[2], ARGV[5])
if ARGV[4] == '1' or redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then redis.call('HSET', KEYS[1], ARGV[2], ARGV[3]) end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. 'up:' .. name) == 0 then redis.call('HDEL', KEYS[1], name) end
end
return redis.call('HGET', KEYS[1], ARGV[2])
