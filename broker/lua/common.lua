-- Put in front of every script: the few things that more than one of them does.
-- Redis's own clock is the only one; whole milliseconds. Scripts also touch req:<id>:<gen> and job:<id>:<gen> of the
-- entries they come across: these names can't be known beforehand, but all keys of a model share one hash slot.

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- {name, value, ...} as a table
local function pairs_of(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

local function req_key(prefix, fields) return prefix .. 'req:' .. fields['id'] .. ':' .. fields['gen'] end
local function job_key(prefix, fields) return prefix .. 'job:' .. fields['id'] .. ':' .. fields['gen'] end

local ENTRY_VERSION = '1'

-- Why no enqueue of this version can have written an entry with these fields; nil: one can.
local function problem_of(fields)
  if fields['v'] ~= ENTRY_VERSION then
    return 'stream entry of version ' .. string.sub(fields['v'] or '(none)', 1, 20) .. ', expected ' .. ENTRY_VERSION
  end
  for _, name in ipairs({'id', 'gateway', 'gateway_id', 'tenant'}) do
    if not fields[name] then return 'stream entry without ' .. name end
  end
  for _, name in ipairs({'gen', 'tokens'}) do
    if not string.match(fields[name] or '', '^%d+$') or #fields[name] > 9 then return 'stream entry without ' .. name end
  end
  for _, name in ipairs({'due', 'deadline'}) do
    local number = tonumber(fields[name])
    if not number or not (math.abs(number) < 2 ^ 53) then return 'stream entry without ' .. name end -- also NaN
  end
end

-- The entry's fields, or nil. Of a foreign or damaged one as much as can be read, and what is wrong with it.
local function fields_of(stream, entry)
  local found = redis.call('XRANGE', stream, entry, entry)
  if #found == 0 then return nil end
  local fields = pairs_of(found[1][2])
  local problem = problem_of(fields)
  if not problem then return fields end
  local readable = {gen = string.match(fields['gen'] or '', '^%d%d?%d?$') or '0'}
  for _, name in ipairs({'id', 'tokens', 'tenant', 'gateway', 'gateway_id'}) do
    readable[name] = string.sub(fields[name] or '', 1, 200)
  end
  return readable, problem
end

-- Redis has answered without a gap since this time; `gap` is the silence (ms) that counts as one.
local function steady_since(clock, now, gap, is_touched)
  local seen = redis.call('HMGET', clock, 'last', 'since')
  local last, since = tonumber(seen[1] or 0), tonumber(seen[2] or 0)
  if now - last > gap or now < last then since = now end -- also when the clock was set back
  if is_touched then
    redis.call('PERSIST', clock) -- a write that needs no memory: the small ones after it then pass in a full Redis too
    redis.call('HSET', clock, 'last', whole(now), 'since', whole(since))
  end
  return since
end

-- A gateway is gone when its heartbeat is old although Redis answered all along. One that never registered is not.
local function is_gone(workers, gateway_id, now, is_steady, orphan)
  local beat = is_steady and redis.call('ZSCORE', workers, gateway_id)
  return beat and now - tonumber(beat) > orphan
end

-- The fence: true while `owner` holds `entry` in this very attempt. Raises NOGROUP before anything was written.
local function holds(stream, group, owner, entry, req, attempt)
  return #redis.call('XPENDING', stream, group, entry, entry, 1, owner) == 1
    and redis.call('HGET', req, 'attempt') == attempt
end

-- Takes the job out of stream, group and ready set; its request hash stays readable for `ttl` ms.
-- XACK comes first: it passes in a full Redis, and what follows a first write passes too. Nothing stays half-written.
local function remove(stream, ready, group, entry, req, ttl, state, reason)
  redis.call('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
  redis.call('ZREM', ready, entry)
  redis.call('HSET', req, 'state', state, 'reason', reason, 'settled', whole(now_ms()))
  redis.call('PEXPIRE', req, ttl)
end

-- Back to its old place; nobody's lease any more, so a zombie fails the fence at once.
local function put_back(stream, ready, group, entry, due, req, reason)
  redis.call('XACK', stream, group, entry)
  redis.call('ZADD', ready, due, entry)
  redis.call('HSET', req, 'state', 'queued', 'worker', '', 'reason', reason)
end

-- Wakes the workers that sleep in XREAD: the stream itself says nothing when a job comes back.
local function wake_workers(wake, why)
  redis.call('XADD', wake, 'MAXLEN', '1', '*', 'why', why)
end

-- One more failure, by cause: the causes are listed in their order. Returns {failures, causes}.
local function count_failure(req, cause)
  local known = redis.call('HMGET', req, 'failures', 'causes')
  local failures = tonumber(known[1] or 0) + 1
  local causes = (known[2] and known[2] ~= '' and known[2] .. ' ' or '') .. cause
  redis.call('HSET', req, 'failures', whole(failures), 'causes', causes)
  return {failures, causes}
end

-- Given up: kept with its reason in the dead stream, its payload for `payload_ttl` ms.
local function bury(dead, max_dead, job, payload_ttl, fields, attempt, worker, reason, detail, causes)
  redis.call('XADD', dead, 'MAXLEN', max_dead, '*', 'id', fields['id'], 'gen', fields['gen'], 'reason', reason,
    'attempts', attempt, 'worker', worker, 'error', detail, 'causes', causes or '', 'tokens', fields['tokens'],
    'tenant', fields['tenant'])
  redis.call('PEXPIRE', job, payload_ttl)
end

-- What Python needs to tell the gateway that the queue itself ended a job.
local function dead_job(fields, attempt, reason, detail)
  return {fields['id'], fields['gen'], attempt, fields['gateway'], fields['gateway_id'], reason, detail}
end
