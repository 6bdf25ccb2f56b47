#!lua flags=allow-oom
-- pause: records which groups in flight of an orchestrator wait for the learner's next version; its others are sampled. A continued group is
-- timed from now on. The other orchestrators may have to continue some of theirs.
-- KEYS: common. Writes ledger.
-- ARGV: orchestrator's term, its number, then the indices of its paused groups. Returns how many of its groups in flight are paused.
local role = orchestrator(tonumber(ARGV[2]))
local stale = refused(role, ARGV[1])
if stale then return stale end
local paused = {}
for at = 3, #ARGV do paused[tonumber(ARGV[at])] = true end
if orchestrators() > 1 then signal('pause', role) end
return mark_paused(paused, role)
