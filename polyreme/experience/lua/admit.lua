#!lua
-- admit: (none) -> admitted(version, attempt 1) for the next indices, as many as the bound and `most` allow. Once per nonce.
-- KEYS: common, then once (string that expires). Reads meta, plans, appended; writes ledger, in_flight, once.
-- ARGV: the leading orchestrator's term, most. Returns {{index, attempt, version}, ...}; may be empty.
local stale = refused('orchestrator', ARGV[1])
if stale then return stale end
local done = redis.call('GET', KEYS[10])
if done then
  local first, count = string.match(done, '^(%d+) (%d+)$')
  local still = {}
  for index = tonumber(first), first + count - 1 do
    local r = row(index)
    if r.state == 'admitted' then still[#still + 1] = {index, r.attempt, r.third} end
  end
  return still
end
local version = meta('version')
if version < 0 then return {} end
-- Unplanned groups must all fit the iterations that may still use tokens of this version, and the run's last one.
local horizon = math.min(version + 1 + meta('max_staleness'), meta('iterations'))
local unplanned = redis.call('ZCARD', IN_FLIGHT) + redis.call('ZCARD', APPENDED)
local count = math.min((horizon - planned()) * meta('groups_per_iteration') - unplanned, tonumber(ARGV[2]))
-- Rows are never deleted, so the next index follows from their number.
local first = math.max(0, meta('first_group')) + redis.call('HLEN', LEDGER)
local now, admitted = int(now_ms()), {}
for index = first, first + count - 1 do
  redis.call('ZADD', IN_FLIGHT, version, member(index))
  write(index, 'admitted', '1', int(version), now)
  admitted[#admitted + 1] = {index, 1, version}
end
if count > 0 then
  redis.call('SET', KEYS[10], int(first) .. ' ' .. int(count), 'EX', '600')
  if orchestrators() > 1 then signal('admit', int(first)) end
end
return admitted
