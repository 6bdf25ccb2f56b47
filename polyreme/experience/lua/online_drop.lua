#!lua flags=allow-oom
-- online_drop: open or rewarded -> dropped(reason); its turns are deleted, and its state is kept for a while. A session that has ended
-- stays as it is.
-- KEYS: common, then online_open, online_rewarded, online_versions, online_counts, and the session.
-- ARGV: orchestrator's term, id, reason, seconds to keep the state. Returns 1, or 0 when it has ended before.
local stale = refused('orchestrator', ARGV[1])
if stale then return stale end
local state = redis.call('HGET', KEYS[14], 'state')
if state ~= 'open' and state ~= 'rewarded' then return 0 end
for at = 10, 12 do redis.call('ZREM', KEYS[at], ARGV[2]) end
redis.call('DEL', KEYS[14])
redis.call('HSET', KEYS[14], 'state', 'dropped', 'reason', ARGV[3])
redis.call('EXPIRE', KEYS[14], ARGV[4])
redis.call('HINCRBY', KEYS[13], 'dropped ' .. ARGV[3], 1)
return 1
