#!lua flags=allow-oom
-- pause: records which groups in flight wait for the learner's next version; the others are sampled. A continued group is timed from now
-- on.
-- KEYS: common. Writes ledger.
-- ARGV: orchestrator's term, then the indices of all paused groups. Returns how many groups in flight are paused.
local stale = refused('orchestrator', ARGV[1])
if stale then return stale end
local paused = {}
for at = 2, #ARGV do paused[tonumber(ARGV[at])] = true end
return mark_paused(paused)
