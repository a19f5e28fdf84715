-- What became of jobs, as far as Redis knows.
-- KEYS 1 stream, 2 ready
-- ARGV req keys
-- Returns {state, reason} per key. State `lost`: no request hash, or one that says `queued` or `prefill` without its
-- stream entry (or, queued, without its place in `ready`): nobody will ever take it.
local answers = {}
for i, req in ipairs(ARGV) do
  local known = redis.call('HMGET', req, 'state', 'entry', 'reason')
  local state, entry = known[1], known[2]
  local is_here = state and true or false
  if state == 'queued' then is_here = entry and redis.call('ZSCORE', KEYS[2], entry) end
  if is_here and (state == 'queued' or state == 'prefill') then
    is_here = entry and #redis.call('XRANGE', KEYS[1], entry, entry) == 1
  end
  answers[i] = is_here and {state, known[3] or ''} or {'lost', ''}
end
return answers
