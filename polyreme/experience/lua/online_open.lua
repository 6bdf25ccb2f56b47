#!lua
-- online_open: a product's session, (none) -> open, unless `most` sessions are kept. The same id again changes nothing.
-- KEYS: common, then online_open, online_rewarded (zsets: id by the time of its last turn, or of its reward, in ms), online_counts
-- (hash), and the session (hash). ARGV: id, task, most. Returns 1, or 0 when there is no room.
if redis.call('EXISTS', KEYS[13]) == 1 then return 1 end
if redis.call('ZCARD', KEYS[10]) + redis.call('ZCARD', KEYS[11]) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[13], 'state', 'open', 'task', ARGV[2], 'turns', '0')
redis.call('ZADD', KEYS[10], now_ms(), ARGV[1])
redis.call('HINCRBY', KEYS[12], 'opened', 1)
return 1
