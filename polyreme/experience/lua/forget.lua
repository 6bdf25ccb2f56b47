#!lua flags=allow-oom
-- forget: deletes the kept requests of a lane up to a sequence number, which a saved state includes.
-- KEYS: common, then requests, kept, lane, lanes as in finish. ARGV: sequence number, lane. Returns their number.
local requests, kept, lane = KEYS[10], KEYS[11], KEYS[12]
local ids = redis.call('ZRANGEBYSCORE', kept, '-inf', ARGV[1])
for _, id in ipairs(ids) do
  redis.call('HINCRBY', lane, 'bytes', -redis.call('HSTRLEN', requests, id))
  redis.call('HDEL', requests, id)
end
redis.call('ZREMRANGEBYSCORE', kept, '-inf', ARGV[1])
if redis.call('EXISTS', kept) == 0 then redis.call('SREM', KEYS[13], ARGV[2]) end
return #ids
