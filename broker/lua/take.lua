-- Leases to `owner` the jobs that are due first, in strict order, while their tokens fit; ends hopeless ones on the way.
-- KEYS 1 stream, 2 ready, 3 dead, 4 clock, 5 workers, 6 wake
-- ARGV 1 group, 2 owner, 3 key prefix, 4 most tokens, 5 most jobs, 6 most entries looked at, 7 gap ms, 8 orphan ms,
--      9 req TTL ms, 10 dead payload TTL ms, 11 most dead letters, 12 1: the owner has nothing else in its engine
-- Returns {1 when it stopped at the look limit, jobs left in ready, newest stream id, newest wake id, leases, dead jobs};
--   a lease is
--   {entry, id, gen, attempt, failures, ms to the deadline, ms waited, payload}.
-- A job that failed before is leased alone, to an owner with nothing else in its engine: what it does, it does to itself.
-- The newest ids are of the same instant as an empty result: a sleeper that reads from them misses nothing.
redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1) -- NOGROUP comes out here, before anything is written
local now = now_ms()
local budget, max_jobs, max_seen = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local orphan_ms = tonumber(ARGV[8])
local is_steady = now - steady_since(KEYS[4], now, tonumber(ARGV[7]), false) >= orphan_ms
local leases, dead, num_seen = {}, {}, 0

local function finish(entry, fields, req, reason, detail)
  local attempt = redis.call('HGET', req, 'attempt') or '0'
  remove(KEYS[1], KEYS[2], ARGV[1], entry, req, ARGV[9], reason, detail)
  dead[#dead + 1] = dead_job(fields, attempt, reason, detail)
  return attempt
end

local function has_failed(req)
  return tonumber(redis.call('HGET', req, 'failures') or 0) > 0
end

while #leases < max_jobs and num_seen < max_seen do
  local entry = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not entry then break end
  num_seen = num_seen + 1
  local fields, problem = fields_of(KEYS[1], entry)
  if not fields then
    redis.call('ZREM', KEYS[2], entry)
  else
    local req, job = req_key(ARGV[3], fields), job_key(ARGV[3], fields)
    local left = problem and 0 or tonumber(fields['deadline']) - now
    if problem then
      local attempt = finish(entry, fields, req, 'payload_invalid', problem)
      bury(KEYS[3], ARGV[11], job, ARGV[10], fields, attempt, '', 'payload_invalid', problem)
    elseif left <= 0 then
      finish(entry, fields, req, 'deadline', 'deadline passed while queued')
      redis.call('UNLINK', job)
    elseif is_gone(KEYS[5], fields['gateway_id'], now, is_steady, orphan_ms) then
      finish(entry, fields, req, 'orphaned', 'gateway ' .. fields['gateway_id'] .. ' is gone')
      redis.call('UNLINK', job)
    elseif tonumber(fields['tokens']) > budget or (has_failed(req) and (#leases > 0 or ARGV[12] == '0')) then
      break
    elseif redis.call('EXISTS', req) == 0 or redis.call('EXISTS', job) == 0 then
      local attempt = finish(entry, fields, req, 'payload_lost', 'payload or request hash is gone from Redis')
      bury(KEYS[3], ARGV[11], job, ARGV[10], fields, attempt, '', 'payload_lost', 'gone from Redis')
    else
      local attempt = tonumber(redis.call('HGET', req, 'attempt') or 0) + 1
      redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'RETRYCOUNT', whole(attempt), 'FORCE', 'JUSTID')
      redis.call('ZREM', KEYS[2], entry)
      redis.call('HSET', req, 'attempt', whole(attempt), 'state', 'prefill', 'worker', ARGV[2], 'taken', whole(now))
      budget = budget - tonumber(fields['tokens'])
      local known = redis.call('HMGET', req, 'failures', 'enqueued')
      leases[#leases + 1] = {entry, fields['id'], fields['gen'], whole(attempt), known[1] or '0', whole(left),
        whole(now - tonumber(known[2] or now)), redis.call('GET', job)}
      if has_failed(req) then max_jobs = 1 end
    end
  end
end

local function newest(stream)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  return #last > 0 and last[1][1] or '0-0'
end
return {num_seen >= max_seen and 1 or 0, redis.call('ZCARD', KEYS[2]), newest(KEYS[1]), newest(KEYS[6]), leases, dead}
