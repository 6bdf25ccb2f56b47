#!lua flags=allow-oom
-- unlease: removes the lease of a server that leaves, or the id of an expired lease.
-- KEYS: common, then lease (string that expires), leases (set of ids). Writes both.
-- ARGV: id, event value, '1' to remove a live lease.
if ARGV[3] ~= '1' and redis.call('EXISTS', KEYS[10]) == 1 then return 0 end
redis.call('DEL', KEYS[10])
if redis.call('SREM', KEYS[11], ARGV[1]) == 0 then return 0 end
signal('lease', ARGV[2])
return 1
