#!lua flags=allow-oom
-- readmit: admitted(attempt) -> admitted(attempt + 1) at the current version (see next_attempt), or failed(reason) after the last attempt.
-- An existing next attempt is returned again, since a retry and an expired attempt look the same.
-- KEYS: common. Writes ledger, in_flight, drafts.
-- ARGV: term of the group's orchestrator, index, attempt, reason, max_attempts. Returns {index, attempt, version}, or false when failed.
local index, attempt = tonumber(ARGV[2]), tonumber(ARGV[3])
local stale = refused(maker(index), ARGV[1])
if stale then return stale end
local r = row(index)
if not r then return redis.error_reply('ORDER group ' .. int(index) .. ' was never admitted') end
if r.state == 'failed' and r.attempt == attempt then return false end
if r.state ~= 'admitted' or (r.attempt ~= attempt and r.attempt ~= attempt + 1) then
  return redis.error_reply('STALEATTEMPT ' .. r.text)
end
if r.attempt == attempt and not next_attempt(index, r, ARGV[4], tonumber(ARGV[5])) then return false end
r = row(index)
return {index, r.attempt, r.third}
