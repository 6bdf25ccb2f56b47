#!lua flags=allow-oom
-- finish: stores the result of an open request. The first result of a request stands; a later one changes nothing.
-- KEYS: common, then requests, open, result, lane as in submit, kept (zset id, by sequence number: executed requests that a restart must
-- execute again, because no saved state includes them), begun (hash id -> "BEGINNINGS NONCE" of the newest one), lanes (set of lanes with kept
-- requests), results (list of the client: "BYTES ID" of its results, the oldest first), bytes (their sum), events of results, records
-- (stream for the observer, bounded: model, line). Writes all of them.
-- ARGV: id, result, the result's life in ms, sequence number (-1: none), 1 if the request is kept, lane, the prefix of the results' keys, most
-- bytes of the client's results, tenant, the request's record ('': none), most records. Returns whether the result was stored.
local id, life, seq = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local requests, open, result, lane, kept, results = KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[17]
if redis.call('ZREM', open, id) == 0 then return 0 end
redis.call('HDEL', KEYS[15], id)
if redis.call('HINCRBY', META, 'open ' .. ARGV[9], -1) <= 0 then redis.call('HDEL', META, 'open ' .. ARGV[9]) end
redis.call('SET', result, ARGV[2], 'PX', ARGV[3])
if ARGV[5] == '1' then
  redis.call('ZADD', kept, seq, id)
  redis.call('SADD', KEYS[16], ARGV[6])
else
  if seq >= 0 then redis.call('HINCRBY', lane, 'bytes', -redis.call('HSTRLEN', requests, id)) end
  redis.call('HDEL', requests, id)
end
redis.call('RPUSH', results, #ARGV[2] .. ' ' .. id)
local bytes = redis.call('INCRBY', KEYS[18], #ARGV[2])
redis.call('PEXPIRE', results, 2 * life)
redis.call('PEXPIRE', KEYS[18], 2 * life)
while true do  -- at least the new one stays
  local size, old = string.match(redis.call('LINDEX', results, 0), '^(%d+) (.*)$')
  local name = ARGV[7] .. ':' .. old
  if old == id or (bytes <= tonumber(ARGV[8]) and redis.call('EXISTS', name) == 1) then break end
  redis.call('DEL', name)
  redis.call('LPOP', results)
  bytes = redis.call('DECRBY', KEYS[18], size)
end
if ARGV[10] ~= '' then redis.call('XADD', KEYS[20], 'MAXLEN', '~', ARGV[11], '*', 'model', ARGV[6], 'line', ARGV[10]) end
signal('result', id, KEYS[19])
return 1
