#!lua flags=allow-oom
-- use: reads a record of a tenant of the training service, and renews it. It writes, which waits for the disk, at most every ten seconds.
-- KEYS: common, then the record (hash). Writes its expiry.
-- ARGV: tenant, seconds. Returns the seconds after which it would have expired, and its fields and values; nothing if the tenant has none.
local record, life = KEYS[10], tonumber(ARGV[2])
if redis.call('HGET', record, 'tenant') ~= ARGV[1] then return {} end
local left = redis.call('TTL', record)
if left < life - 10 or left > life then redis.call('EXPIRE', record, life) end
return {left, unpack(redis.call('HGETALL', record))}
