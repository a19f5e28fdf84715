-- Takes expired leases from their owners: the jobs go back to their place and count a failure; too many: a dead letter.
-- KEYS 1 stream, 2 ready, 3 dead, 4 clock, 5 wake
-- ARGV 1 group, 2 key prefix, 3 lease ms, 4 gap ms, 5 cursor, 6 entries a call, 7 most failures, 8 req TTL ms,
--      9 dead payload TTL ms, 10 most dead letters, 11 ms after which an idle consumer name is dropped
-- Returns {next cursor, jobs put back, dead jobs}. After a gap in Redis's answers (restart, network, nobody there)
-- nothing is claimed for one lease: the owners get time to renew. A consumer is dropped only with nothing pending: when
-- its process left the registry without a word (a lease ago), or has been idle for long. A live one's comes back.
local now, lease = now_ms(), tonumber(ARGV[3])
redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1) -- NOGROUP comes out here, before anything is written
if now - steady_since(KEYS[4], now, tonumber(ARGV[4]), true) < lease then return {'0-0', 0, {}} end
local claimed = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], '-', lease, ARGV[5], 'COUNT', ARGV[6], 'JUSTID')

local dead, count = {}, 0
for _, entry in ipairs(claimed[2]) do
  local fields, problem = fields_of(KEYS[1], entry)
  if fields then
    local req, job = req_key(ARGV[2], fields), job_key(ARGV[2], fields)
    local known = redis.call('HMGET', req, 'worker', 'attempt')
    local worker, attempt = known[1] or '', known[2] or '0'
    local reason, detail = 'max_attempts', 'lease of ' .. worker .. ' ran out'
    if problem then reason, detail = 'payload_invalid', problem end
    local counted = count_failure(req, 'lease_expired')
    if problem or counted[1] >= tonumber(ARGV[7]) then
      remove(KEYS[1], KEYS[2], ARGV[1], entry, req, ARGV[8], reason, detail)
      bury(KEYS[3], ARGV[10], job, ARGV[9], fields, attempt, worker, reason, detail, counted[2])
      dead[#dead + 1] = dead_job(fields, attempt, reason, detail)
    else
      put_back(KEYS[1], KEYS[2], ARGV[1], entry, fields['due'], req, detail)
      count = count + 1
    end
  else
    redis.call('XACK', KEYS[1], ARGV[1], entry)
  end
end
if count > 0 then wake_workers(KEYS[5], 'reaped') end

if claimed[1] == '0-0' then
  for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local consumer = pairs_of(flat)
    local name, idle = consumer['name'], tonumber(consumer['idle'])
    local is_gone = name ~= '-' and idle > lease and redis.call('EXISTS', ARGV[2] .. 'worker:' .. name) == 0
    if tonumber(consumer['pending']) == 0 and (is_gone or idle > tonumber(ARGV[11])) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], name)
    end
  end
end
return {claimed[1], count, dead}
