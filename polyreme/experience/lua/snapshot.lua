#!lua flags=allow-oom,no-writes
-- snapshot: everything except the payloads and the parts of partial rollouts, at one instant.
-- KEYS: common. Returns {meta, ledger, plans, payload indices, in_flight with scores, appended with scores, drafts}, each flat;
-- of the drafts (index, "ATTEMPT PARTS"), and for each part (INDEX:PART, '').
local drafts = {}
for _, field in ipairs(redis.call('HKEYS', DRAFTS)) do
  drafts[#drafts + 1] = field
  drafts[#drafts + 1] = string.find(field, ':') and '' or redis.call('HGET', DRAFTS, field)
end
return {
  redis.call('HGETALL', META),
  redis.call('HGETALL', LEDGER),
  redis.call('HGETALL', PLANS),
  redis.call('HKEYS', PAYLOADS),
  redis.call('ZRANGE', IN_FLIGHT, 0, -1, 'WITHSCORES'),
  redis.call('ZRANGE', APPENDED, 0, -1, 'WITHSCORES'),
  drafts,
}
