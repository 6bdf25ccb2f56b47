#!lua
-- commit: records that a replica has staged or serves a version. Adds one entry to the commits stream, once per nonce.
-- KEYS: common, then commits (stream), once (string that expires). Writes commits, once, events.
-- ARGV: learner's term, bound of the stream, replica, entry.
local stale = refused('learner', ARGV[1])
if stale then return stale end
if not redis.call('SET', KEYS[11], '1', 'NX', 'EX', '600') then return 0 end
redis.call('XADD', KEYS[10], 'MAXLEN', '~', ARGV[2], '*', 'json', ARGV[4])
signal('commit', ARGV[3])
return 1
