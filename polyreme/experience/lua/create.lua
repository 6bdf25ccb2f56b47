#!lua
-- create: the run record, once. The same nonce again changes nothing.
-- KEYS: common, then config (string), files (hash). Writes meta, config, files.
-- ARGV: nonce, config json, number of limits n, n pairs (limit, value), then pairs (file name, bytes). Returns the start.
local nonce, config, n = ARGV[1], ARGV[2], tonumber(ARGV[3])
local creator = redis.call('HGET', META, 'creator')
if creator == nonce then return meta('start') end
if creator then return redis.error_reply('RUNEXISTS ' .. META) end
redis.call('SET', KEYS[10], config)
for at = 4 + 2 * n, #ARGV, 2 do redis.call('HSET', KEYS[11], ARGV[at], ARGV[at + 1]) end
redis.call('HSET', META, 'creator', nonce, 'state', 'starting', 'reason', '', 'start', '1', 'low_water', '0')
for at = 4, 3 + 2 * n, 2 do redis.call('HSET', META, ARGV[at], ARGV[at + 1]) end -- those of a fork also set first_group and low_water
signal('state', 'starting')
return 1
