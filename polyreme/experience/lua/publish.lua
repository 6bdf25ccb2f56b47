#!lua
-- publish: one entry on a stream for readers (metrics, commits), once per nonce.
-- KEYS: common, then stream, once (string that expires). Writes stream, once, events.
-- ARGV: bound of the stream, event kind, event value, entry.
if not redis.call('SET', KEYS[11], '1', 'NX', 'EX', '600') then return 0 end
redis.call('XADD', KEYS[10], 'MAXLEN', '~', ARGV[1], '*', 'json', ARGV[4])
signal(ARGV[2], ARGV[3])
return 1
