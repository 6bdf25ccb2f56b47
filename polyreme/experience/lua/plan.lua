#!lua flags=allow-oom
-- plan: appended -> planned(iteration) for groups_per_iteration groups, those with the oldest tokens first, then by index.
-- An existing plan is returned again. While a plan waits, attempts in flight beyond the straggler timeout expire.
-- KEYS: common. Reads meta; writes ledger, in_flight and drafts (expiry), appended, plans.
-- ARGV: learner's term, iteration, straggler timeout in ms. Returns "INDEX INDEX ...", or false when the plan must wait.
local stale = refused('learner', ARGV[1])
if stale then return stale end
local iteration, timeout = tonumber(ARGV[2]), tonumber(ARGV[3])
local existing = redis.call('HGET', PLANS, int(iteration))
if existing then return existing end
if iteration ~= planned() + 1 then
  return redis.error_reply('ORDER iteration ' .. int(iteration) .. ' cannot follow plans up to iteration ' .. int(planned()))
end
local size, staleness, version = meta('groups_per_iteration'), meta('max_staleness'), meta('version')

-- A group of version a must be trained by iteration a + 1 + max_staleness. After this plan, the unplanned groups
-- of versions <= a must therefore fit the iterations up to that one; otherwise the plan waits for those in flight.
local waits_for = redis.call('ZCARD', APPENDED) < size and '+inf' or nil
for a = version, math.min(version, iteration - 1 - staleness), -1 do
  if waits_for then break end
  local left = redis.call('ZCOUNT', IN_FLIGHT, '-inf', a) + math.max(0, redis.call('ZCOUNT', APPENDED, '-inf', a) - size)
  if left > math.max(0, a + 1 + staleness - iteration) * size then waits_for = a end
end
if waits_for then
  local before = now_ms() - timeout
  -- Training time does not count as straggling: the time counts from the version at which the plan waits.
  if meta('version_since') > before then return false end
  local taken = {}  -- role -> when its holder took it
  for _, m in ipairs(redis.call('ZRANGEBYSCORE', IN_FLIGHT, '-inf', waits_for)) do
    local index = tonumber(m)
    local r, role = row(index), maker(index)
    local since = tonumber(string.match(r.text, '(%d+)$'))  -- nil: paused
    taken[role] = taken[role] or meta(role .. '_since')
    if since and math.max(since, taken[role]) <= before then
      if next_attempt(index, r, 'straggler', meta('max_attempts')) then signal('expire', int(index)) end
    end
  end
  return false
end

local chosen = {}
for _, m in ipairs(redis.call('ZRANGE', APPENDED, 0, size - 1)) do
  local index = tonumber(m)
  local r = row(index)
  redis.call('ZREM', APPENDED, m)
  write(index, 'planned', int(r.attempt), int(r.third), int(iteration))
  chosen[#chosen + 1] = int(index)
end
local plan = table.concat(chosen, ' ')
redis.call('HSET', PLANS, int(iteration), plan)
signal('plan', int(iteration))
return plan
