#!lua flags=allow-oom
-- lease: registers a server, or renews its lease, for another `ttl`.
-- KEYS: common, then lease (string that expires), leases (set of ids). Writes both.
-- ARGV: id, lease json, ttl in ms, event value. Returns the learner's term, 0 before the first.
local before = redis.call('GET', KEYS[10])
if before ~= ARGV[2] then signal('lease', ARGV[4]) end
redis.call('SET', KEYS[10], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[11], ARGV[1])
return tonumber(string.match(redis.call('HGET', TERMS, 'learner') or '0', '^%d+'))
