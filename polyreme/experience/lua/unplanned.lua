#!lua flags=allow-oom,no-writes
-- unplanned: the groups that no plan has taken, at one instant.
-- KEYS: common. Returns {version, newest planned iteration, in_flight with scores, appended with scores, indices of paused groups}, in_flight and
-- appended flat. The last list is empty for a single orchestrator, which knows what it has paused.
local paused = {}
if orchestrators() > 1 then
  for _, m in ipairs(redis.call('ZRANGE', IN_FLIGHT, 0, -1)) do
    local index = tonumber(m)
    if string.match(row(index).text, 'paused$') then paused[#paused + 1] = index end
  end
end
return {
  meta('version'),
  planned(),
  redis.call('ZRANGE', IN_FLIGHT, 0, -1, 'WITHSCORES'),
  redis.call('ZRANGE', APPENDED, 0, -1, 'WITHSCORES'),
  paused,
}
