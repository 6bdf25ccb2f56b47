#!lua flags=allow-oom
-- resume: any state -> starting, with the configuration (and its limits) and files that this resume was given.
-- KEYS: common, then config (string), files (hash). Writes meta, config, files.
-- ARGV: as in create; the nonce is not needed, since a second time changes nothing.
local config, n = ARGV[2], tonumber(ARGV[3])
if redis.call('EXISTS', META) == 0 then return redis.error_reply('NORUN ' .. META) end
redis.call('SET', KEYS[10], config)
redis.call('DEL', KEYS[11])
for at = 4 + 2 * n, #ARGV, 2 do redis.call('HSET', KEYS[11], ARGV[at], ARGV[at + 1]) end
for at = 4, 3 + 2 * n, 2 do redis.call('HSET', META, ARGV[at], ARGV[at + 1]) end
redis.call('HSET', META, 'state', 'starting', 'reason', '')
signal('state', 'starting')
return 1
