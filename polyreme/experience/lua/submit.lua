#!lua
-- submit: adds a request of the training service to its log, before anything executes it. A repetition changes nothing.
-- KEYS: common, then requests (hash id -> payload), open (zset id, by arrival), result (string of this id), lane (hash of the model: submitted,
-- bytes), events of the worker. Writes requests, open, lane, events.
-- ARGV: id, payload, sequence number (-1: the request has no order), most open requests, most bytes of the lane, tenant, most open requests of
-- the tenant, which `open TENANT` of meta counts.
-- Returns new | known | early (an earlier number is missing) | gone (executed, and the result has expired) | full | quota (of the tenant).
local id, payload, seq = ARGV[1], ARGV[2], tonumber(ARGV[3])
local requests, open, result, lane = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
if redis.call('HEXISTS', requests, id) == 1 then return 'known' end
if redis.call('EXISTS', result) == 1 then return 'known' end
if seq >= 0 then
  local submitted = tonumber(redis.call('HGET', lane, 'submitted') or '-1')
  if seq <= submitted then return 'gone' end
  if seq > submitted + 1 then return 'early' end
  if tonumber(redis.call('HGET', lane, 'bytes') or '0') > tonumber(ARGV[5]) then return 'full' end
end
if redis.call('ZCARD', open) >= tonumber(ARGV[4]) then return 'full' end
local count = 'open ' .. ARGV[6]
if tonumber(redis.call('HGET', META, count) or '0') >= tonumber(ARGV[7]) then return 'quota' end
redis.call('HINCRBY', META, count, 1)
redis.call('HSET', requests, id, payload)
redis.call('ZADD', open, redis.call('HINCRBY', META, 'requests', 1), id)
if seq >= 0 then
  redis.call('HSET', lane, 'submitted', int(seq))
  redis.call('HINCRBY', lane, 'bytes', #payload)
end
signal('request', id, KEYS[14])
return 'new'
