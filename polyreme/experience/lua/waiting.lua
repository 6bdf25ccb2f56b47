#!lua flags=allow-oom,no-writes
-- waiting: what a worker of the training service has to do.
-- KEYS: common, then requests, open, begun as in submit and finish. ARGV: arrival, most bytes of payloads.
-- Returns the ids of the open requests by arrival, the arrival of the newest one, id and beginnings of those that have begun, and id and payload of
-- those that came after `arrival`, as many as have no more bytes.
local ids, begun, payloads = redis.call('ZRANGE', KEYS[11], 0, -1), redis.call('HGETALL', KEYS[12]), {}
local newest, room = redis.call('ZREVRANGE', KEYS[11], 0, 0, 'WITHSCORES')[2] or ARGV[1], tonumber(ARGV[2])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[11], '(' .. ARGV[1], '+inf')) do
  room = room - redis.call('HSTRLEN', KEYS[10], id)
  if room < 0 then break end
  payloads[#payloads + 1] = id
  payloads[#payloads + 1] = redis.call('HGET', KEYS[10], id)
end
return {ids, newest, begun, payloads}
