#!lua
-- online_turn: adds a turn to an open session. The same turn again changes nothing.
-- KEYS: common, then online_open, online_versions (zset: id by its oldest version), and the session.
-- ARGV: id, number of the turn from 0, its bytes, its oldest version. Returns `ok`, or `conflict`, or the session's other state.
local state = redis.call('HGET', KEYS[12], 'state')
if state ~= 'open' then return state or 'unknown' end
local turns = tonumber(redis.call('HGET', KEYS[12], 'turns'))
if tonumber(ARGV[2]) ~= turns then
  return redis.call('HGET', KEYS[12], ARGV[2]) == ARGV[3] and 'ok' or 'conflict'
end
redis.call('HSET', KEYS[12], ARGV[2], ARGV[3], 'turns', int(turns + 1))
local oldest = math.min(tonumber(ARGV[4]), tonumber(redis.call('ZSCORE', KEYS[11], ARGV[1]) or ARGV[4]))
redis.call('ZADD', KEYS[11], oldest, ARGV[1])
redis.call('ZADD', KEYS[10], now_ms(), ARGV[1])
return 'ok'
