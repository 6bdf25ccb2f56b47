#!lua
-- append: admitted(attempt) -> appended, with its payload. The same attempt again changes nothing.
-- KEYS: common, then pass_rates. Writes ledger, in_flight, appended, payloads, drafts, pass_rates.
-- ARGV: term of the group's orchestrator, index, attempt, oldest version, mean reward, payload, prompt ('' counts nothing), samples, solved. Returns 1, or 0 for a duplicate.
local index, attempt = tonumber(ARGV[2]), tonumber(ARGV[3])
local stale = refused(maker(index), ARGV[1])
if stale then return stale end
if index < meta('low_water') then return 0 end
local r = row(index)
if not r then return redis.error_reply('ORDER group ' .. int(index) .. ' was never admitted') end
if (r.state == 'appended' or r.state == 'planned') and r.attempt == attempt then return 0 end
if r.state ~= 'admitted' or r.attempt ~= attempt then return redis.error_reply('STALEATTEMPT ' .. r.text) end
if tonumber(ARGV[4]) < r.third then
  return redis.error_reply('ORDER group ' .. int(index) .. ' was admitted at version ' .. int(r.third)
    .. ' and cannot hold tokens of version ' .. ARGV[4])
end
redis.call('ZREM', IN_FLIGHT, member(index))
cut_draft(index, 0)
redis.call('ZADD', APPENDED, tonumber(ARGV[4]), member(index))
redis.call('HSET', PAYLOADS, int(index), ARGV[6])
count_tally(KEYS[10], ARGV[7], ARGV[8], ARGV[9])
write(index, 'appended', int(attempt), ARGV[4], ARGV[5])
-- Signals only once a full batch is available.
if redis.call('ZCARD', APPENDED) >= meta('groups_per_iteration') then signal('append', int(index)) end
return 1
