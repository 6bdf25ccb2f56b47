#!lua flags=allow-oom,no-writes
-- snapshot: everything but the payloads themselves, at one instant.
-- KEYS: common. Returns {meta, ledger, plans, payload indices, in_flight with scores, appended with scores}, each flat.
return {
  redis.call('HGETALL', META),
  redis.call('HGETALL', LEDGER),
  redis.call('HGETALL', PLANS),
  redis.call('HKEYS', PAYLOADS),
  redis.call('ZRANGE', IN_FLIGHT, 0, -1, 'WITHSCORES'),
  redis.call('ZRANGE', APPENDED, 0, -1, 'WITHSCORES'),
}
