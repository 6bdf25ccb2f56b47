#!lua flags=allow-oom
-- version: records that iteration `version`, the next one, is trained. The current version changes nothing.
-- KEYS: common. Writes meta.version, meta.version_since.
-- ARGV: learner's term, version.
local stale = refused('learner', ARGV[1])
if stale then return stale end
local version, now = tonumber(ARGV[2]), meta('version')
if version == now then return 0 end
if version ~= now + 1 or version > planned() then
  return redis.error_reply('ORDER version ' .. int(version) .. ' cannot follow version ' .. int(now) .. ' with plans up to iteration '
    .. int(planned()))
end
redis.call('HSET', META, 'version', int(version), 'version_since', int(now_ms()))
signal('version', int(version))
return 1
