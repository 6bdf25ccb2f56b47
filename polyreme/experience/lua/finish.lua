#!lua flags=allow-oom
-- finish: stores the result of an open request. The first result of a request stands; a later one changes nothing.
-- KEYS: common, then requests, open, result, lane as in submit, and kept (zset id, by sequence number: executed requests that a restart must
-- execute again, because no saved state includes them), and begun (hash id -> beginnings). Writes all of them and events.
-- ARGV: id, result, the result's life in ms, sequence number (-1: none), 1 if the request is kept. Returns whether the result was stored.
local id, seq = ARGV[1], tonumber(ARGV[4])
local requests, open, result, lane, kept = KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14]
if redis.call('ZREM', open, id) == 0 then return 0 end
redis.call('HDEL', KEYS[15], id)
redis.call('SET', result, ARGV[2], 'PX', ARGV[3])
if ARGV[5] == '1' then
  redis.call('ZADD', kept, seq, id)
else
  if seq >= 0 then redis.call('HINCRBY', lane, 'bytes', -redis.call('HSTRLEN', requests, id)) end
  redis.call('HDEL', requests, id)
end
signal('result', id)
return 1
