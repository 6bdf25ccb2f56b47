#!lua flags=allow-oom
-- begun: counts a beginning of the execution of each request. A repeated nonce counts once.
-- KEYS: common, then begun as in finish. ARGV: nonce of the call, ids. Returns the beginnings of each.
local counts = {}
for number = 2, #ARGV do
  local count, nonce = string.match(redis.call('HGET', KEYS[10], ARGV[number]) or '0', '^(%d+) ?(%S*)$')
  counts[number - 1] = tonumber(count) + (nonce == ARGV[1] and 0 or 1)
  redis.call('HSET', KEYS[10], ARGV[number], int(counts[number - 1]) .. ' ' .. ARGV[1])
end
return counts
