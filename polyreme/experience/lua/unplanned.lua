#!lua flags=allow-oom,no-writes
-- unplanned: the groups that no plan has taken, at one instant.
-- KEYS: common. Returns {version, newest planned iteration, in_flight with scores, appended with scores}, the last two flat.
return {
  meta('version'),
  planned(),
  redis.call('ZRANGE', IN_FLIGHT, 0, -1, 'WITHSCORES'),
  redis.call('ZRANGE', APPENDED, 0, -1, 'WITHSCORES'),
}
