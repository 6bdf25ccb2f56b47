#!lua flags=allow-oom
-- state: makes one legal transition of the run's state. Setting the current state changes nothing.
-- KEYS: common. Writes meta.
-- ARGV: state, reason, the caller's start.
local LEGAL = {
  starting = {running = true, draining = true, done = true, failed = true},
  running = {draining = true, done = true, failed = true},
  draining = {done = true, stopped = true, failed = true},
  done = {},
  stopped = {},
  failed = {},
}
local now = redis.call('HGET', META, 'state')
if not now then return redis.error_reply('NORUN ' .. META) end
if meta('start') > tonumber(ARGV[3]) then
  return redis.error_reply('STALETERM the run was started again: start ' .. int(meta('start')) .. ', not ' .. ARGV[3])
end
if now == ARGV[1] then return 0 end
if not LEGAL[now][ARGV[1]] then return redis.error_reply('ORDER the run is ' .. now .. ' and cannot become ' .. ARGV[1]) end
redis.call('HSET', META, 'state', ARGV[1], 'reason', ARGV[2])
signal('state', ARGV[1])
return 1
