#!lua
-- publish: one record on the stream of metrics, once per nonce. No event: only readers of that stream wait for records.
-- KEYS: common, then metrics (stream), once (string that expires). Writes both.
-- ARGV: bound of the stream, record.
if not redis.call('SET', KEYS[11], '1', 'NX', 'EX', '600') then return 0 end
redis.call('XADD', KEYS[10], 'MAXLEN', '~', ARGV[1], '*', 'json', ARGV[2])
return 1
