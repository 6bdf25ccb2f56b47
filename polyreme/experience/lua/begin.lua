#!lua flags=allow-oom
-- begin: sets the learner to checkpoint `version`; later plans are kept and replayed.
-- KEYS: common. Reads plans; writes meta.version, and meta.base of a log without plans.
-- ARGV: learner's term, version.
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
redis.call('HSET', META, 'version', int(version))
signal('version', int(version))
return 1
