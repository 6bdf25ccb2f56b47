#!lua
-- admit: (none) -> admitted(version, attempt 1) for the next index, unless the bound refuses. Once per nonce.
-- KEYS: common, then once (string that expires). Reads meta, plans, appended; writes ledger, in_flight, once.
-- ARGV: orchestrator's term. Returns {index, attempt, version}, or false.
local stale = refused('orchestrator', ARGV[1])
if stale then return stale end
local index = tonumber(redis.call('GET', KEYS[9]) or '-1')
if index >= 0 then
  local r = row(index)
  return r.state == 'admitted' and {index, r.attempt, r.third} or false
end
local version = meta('version')
if version < 0 then return false end
-- Unplanned groups must all fit the iterations that may still use tokens of this version, and the run's last one.
local horizon = math.min(version + 1 + meta('max_staleness'), meta('iterations'))
local unplanned = redis.call('ZCARD', IN_FLIGHT) + redis.call('ZCARD', APPENDED)
if unplanned >= (horizon - planned()) * meta('groups_per_iteration') then return false end
index = redis.call('HLEN', LEDGER)
redis.call('ZADD', IN_FLIGHT, version, member(index))
write(index, 'admitted', '1', int(version), int(now_ms()))
redis.call('SET', KEYS[9], int(index), 'EX', '600')
return {index, 1, version}
