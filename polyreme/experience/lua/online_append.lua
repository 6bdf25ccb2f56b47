#!lua
-- online_append: (none) -> appended for the group of some rewarded sessions, which become `trained`. The same sessions again change nothing.
-- The group must fit the iterations that may still use its oldest version, as `admit` and `plan` require.
-- KEYS: common, then online_rewarded, online_versions, online_counts, and the sessions. Writes ledger, appended, payloads.
-- ARGV: orchestrator's term, index, oldest version, mean reward, payload, seconds to keep the sessions' states, then their ids.
-- Returns 1, or 0 when the sessions have ended or the index is not the next one, or -1 while there is no room.
local stale = refused('orchestrator', ARGV[1])
if stale then return stale end
local index, oldest = tonumber(ARGV[2]), tonumber(ARGV[3])
if index ~= math.max(0, meta('first_group')) + redis.call('HLEN', LEDGER) then return 0 end
for at = 13, #KEYS do
  if redis.call('HGET', KEYS[at], 'state') ~= 'rewarded' then return 0 end
end
local staleness, size = meta('max_staleness'), meta('groups_per_iteration')
local due = oldest + 1 + staleness
for by = due, math.max(due, meta('version') + 1 + staleness) do
  local before = redis.call('ZCOUNT', IN_FLIGHT, '-inf', by - 1 - staleness) + redis.call('ZCOUNT', APPENDED, '-inf', by - 1 - staleness)
  if before + 1 > (math.min(by, meta('iterations')) - planned()) * size then return -1 end
end
for at = 13, #KEYS do
  local id, reward = ARGV[at - 6], redis.call('HGET', KEYS[at], 'reward')
  redis.call('ZREM', KEYS[10], id)
  redis.call('ZREM', KEYS[11], id)
  redis.call('DEL', KEYS[at])
  redis.call('HSET', KEYS[at], 'state', 'trained', 'reward', reward, 'group', int(index))
  redis.call('EXPIRE', KEYS[at], ARGV[6])
end
redis.call('HINCRBY', KEYS[12], 'trained', #KEYS - 12)
redis.call('ZADD', APPENDED, oldest, member(index))
redis.call('HSET', PAYLOADS, int(index), ARGV[5])
write(index, 'appended', '1', ARGV[3], ARGV[4])
if redis.call('ZCARD', APPENDED) >= size then signal('append', int(index)) end
return 1
