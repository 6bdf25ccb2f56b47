#!lua flags=allow-oom
-- take: takes a role's next term. A repeated token gets the same term.
-- KEYS: common. Writes terms; of an orchestrator meta.ROLE_since, and ledger, since a new orchestrator has paused nothing.
-- ARGV: role, token. Returns the counter.
if redis.call('EXISTS', META) == 0 then return redis.error_reply('NORUN ' .. META) end
local counter, token = string.match(redis.call('HGET', TERMS, ARGV[1]) or '0 none', '^(%d+) (%S+)$')
if token == ARGV[2] then return tonumber(counter) end
counter = tonumber(counter) + 1
redis.call('HSET', TERMS, ARGV[1], int(counter) .. ' ' .. ARGV[2])
-- An attempt cannot be older than the process that works on it, so stragglers are timed from here.
if ARGV[1] ~= 'learner' then
  redis.call('HSET', META, ARGV[1] .. '_since', int(now_ms()))
  mark_paused({}, ARGV[1])
end
signal('term', ARGV[1])
return counter
