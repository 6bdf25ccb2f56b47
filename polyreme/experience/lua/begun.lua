#!lua flags=allow-oom
-- begun: counts a beginning of the execution of each request.
-- KEYS: common, then begun as in finish. ARGV: ids. Returns the beginnings of each.
local counts = {}
for number, id in ipairs(ARGV) do counts[number] = redis.call('HINCRBY', KEYS[10], id, 1) end
return counts
