-- Puts a job back to its old place, or buries it after too many failures. Fenced by owner and attempt.
-- KEYS 1 stream, 2 ready, 3 req, 4 job, 5 dead, 6 wake
-- ARGV 1 group, 2 owner, 3 entry id, 4 attempt, 5 failure or '' (does not count), 6 most failures, 7 reason of the dead
--      letter, 8 req TTL ms, 9 dead payload TTL ms, 10 most dead letters, 11 cause of the failure, one word
-- Returns false when it was not ours, {} when it is back, or the dead job.
if not holds(KEYS[1], ARGV[1], ARGV[2], ARGV[3], KEYS[3], ARGV[4]) then return false end
local fields = fields_of(KEYS[1], ARGV[3])
if not fields then
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
  return false
end
local failures = tonumber(redis.call('HGET', KEYS[3], 'failures') or 0) + (ARGV[5] ~= '' and 1 or 0)
local is_dead = ARGV[5] ~= '' and failures >= tonumber(ARGV[6])
if is_dead then
  remove(KEYS[1], KEYS[2], ARGV[1], ARGV[3], KEYS[3], ARGV[8], ARGV[7], ARGV[5])
else
  put_back(KEYS[1], KEYS[2], ARGV[1], ARGV[3], fields['due'], KEYS[3], ARGV[5])
end
local counted = ARGV[5] ~= '' and count_failure(KEYS[3], ARGV[11])
if is_dead then
  bury(KEYS[5], ARGV[10], KEYS[4], ARGV[9], fields, ARGV[4], ARGV[2], ARGV[7], ARGV[5], counted[2])
  return dead_job(fields, ARGV[4], ARGV[7], ARGV[5])
end
wake_workers(KEYS[6], 'given back')
return {}
