#!lua flags=allow-oom
-- resume: any state -> starting, with the configuration (and its limits) and files of this resume. A repeated nonce changes nothing.
-- KEYS: common, then config (string), files (hash). Writes meta, config, files.
-- ARGV: as in create. Returns the start.
local nonce, config, n = ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('EXISTS', META) == 0 then return redis.error_reply('NORUN ' .. META) end
if redis.call('HGET', META, 'creator') == nonce then return meta('start') end
redis.call('SET', KEYS[10], config)
redis.call('DEL', KEYS[11])
for at = 4 + 2 * n, #ARGV, 2 do redis.call('HSET', KEYS[11], ARGV[at], ARGV[at + 1]) end
for at = 4, 3 + 2 * n, 2 do redis.call('HSET', META, ARGV[at], ARGV[at + 1]) end
redis.call('HSET', META, 'creator', nonce, 'state', 'starting', 'reason', '')
signal('state', 'starting')
return redis.call('HINCRBY', META, 'start', 1)
