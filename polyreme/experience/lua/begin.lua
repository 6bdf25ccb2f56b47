#!lua flags=allow-oom
-- begin: sets the learner to checkpoint `version`; later plans are kept and replayed.
-- KEYS: common, then pass_rates. Reads plans; writes meta.version, meta.version_since, meta.base of a log without plans, and pass_rates of one that never began.
-- ARGV: learner's term, version, the pass rates of a fork: a line "PROMPT SAMPLES SOLVED STREAK" for each prompt.
local stale = refused('learner', ARGV[1])
if stale then return stale end
local version = tonumber(ARGV[2])
if redis.call('HLEN', PLANS) == 0 then
  redis.call('HSET', META, 'base', int(version), 'released', int(version))
elseif version < meta('released') then
  return redis.error_reply('ORDER version ' .. int(version) .. ' cannot be replayed: groups are released up to iteration '
    .. int(meta('released')))
elseif version > planned() then
  return redis.error_reply('ORDER version ' .. int(version) .. ' is ahead of the log, which has planned up to iteration '
    .. int(planned()))
end
if meta('version') < 0 then
  for prompt, rate in string.gmatch(ARGV[3], '(%S+) ([^\n]+)') do redis.call('HSET', KEYS[10], prompt, rate) end
end
redis.call('HSET', META, 'version', int(version), 'version_since', int(now_ms()))
signal('version', int(version))
return 1
