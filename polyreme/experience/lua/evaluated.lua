#!lua flags=allow-oom
-- evaluated: records that evaluations up to `version` have ended or were skipped. The value never decreases.
-- KEYS: common. Writes meta.evaluated.
-- ARGV: orchestrator's term, version.
local stale = refused('orchestrator', ARGV[1])
if stale then return stale end
if tonumber(ARGV[2]) <= meta('evaluated') then return 0 end
redis.call('HSET', META, 'evaluated', ARGV[2])
signal('evaluated', ARGV[2])
return 1
