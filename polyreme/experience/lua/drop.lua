#!lua flags=allow-oom
-- drop: admitted(attempt) -> dropped(mean reward, reason): scored but not used for training, or not sampled at all (mean reward -).
-- A repetition changes nothing. KEYS: common, then pass_rates. Writes ledger, in_flight, drafts, pass_rates.
-- ARGV: term of the group's orchestrator, index, attempt, mean reward, reason, prompt ('' counts nothing), samples, solved. Returns 1, or 0 for a duplicate.
local index, attempt = tonumber(ARGV[2]), tonumber(ARGV[3])
local stale = refused(maker(index), ARGV[1])
if stale then return stale end
if index < meta('low_water') then return 0 end
local r = row(index)
if not r then return redis.error_reply('ORDER group ' .. int(index) .. ' was never admitted') end
if r.state == 'dropped' and r.attempt == attempt then return 0 end
if r.state ~= 'admitted' or r.attempt ~= attempt then return redis.error_reply('STALEATTEMPT ' .. r.text) end
redis.call('ZREM', IN_FLIGHT, member(index))
cut_draft(index, 0)
count_tally(KEYS[10], ARGV[6], ARGV[7], ARGV[8])
write(index, 'dropped', int(attempt), ARGV[4], ARGV[5])
signal('drop', int(index))
return 1
