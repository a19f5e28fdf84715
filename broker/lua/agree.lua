-- A process says which values it expects the model to have, and hears which ones are in force.
-- KEYS 1 config
-- ARGV 1 TTL ms, 2.. name, value
-- Sets what nobody has set. Lives on while somebody agrees: a process that expects something else doesn't keep it alive.
-- Returns the hash.
local is_agreed = true
for i = 2, #ARGV, 2 do
  local value = redis.call('HGET', KEYS[1], ARGV[i])
  if not value then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  elseif value ~= ARGV[i + 1] then
    is_agreed = false
  end
end
if is_agreed then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return redis.call('HGETALL', KEYS[1])
