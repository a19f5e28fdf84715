-- Removes a job for good. Fenced by owner and attempt.
-- KEYS 1 stream, 2 ready, 3 req, 4 job
-- ARGV 1 group, 2 owner, 3 entry id, 4 attempt, 5 state, 6 decode worker, 7 req TTL ms
-- Returns 1, or 0 when it was not ours any more.
if not holds(KEYS[1], ARGV[1], ARGV[2], ARGV[3], KEYS[3], ARGV[4]) then return 0 end
remove(KEYS[1], KEYS[2], ARGV[1], ARGV[3], KEYS[3], ARGV[7], ARGV[5], '')
redis.call('HSET', KEYS[3], 'decode', ARGV[6])
redis.call('UNLINK', KEYS[4])
return 1
