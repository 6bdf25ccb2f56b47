#!lua flags=allow-oom
-- release: deletes the payloads of plans <= iteration. The low-water mark rises past every final group.
-- KEYS: common. Writes payloads, meta.released, meta.low_water.
-- ARGV: learner's term, iteration. Returns the low-water mark.
local stale = refused('learner', ARGV[1])
if stale then return stale end
local upto = tonumber(ARGV[2])
if upto > meta('version') then
  return redis.error_reply('ORDER iteration ' .. int(upto) .. ' cannot be released: the learner stands at version '
    .. int(meta('version')))
end
for iteration = meta('released') + 1, upto do
  for index in string.gmatch(redis.call('HGET', PLANS, int(iteration)), '%d+') do redis.call('HDEL', PAYLOADS, index) end
  redis.call('HSET', META, 'released', int(iteration))
end
local low, released = meta('low_water'), meta('released')
while true do
  local r = row(low)
  if not r or r.state == 'admitted' or r.state == 'appended' then break end
  if r.state == 'planned' and tonumber(string.match(r.text, '(%d+)$')) > released then break end
  low = low + 1
end
redis.call('HSET', META, 'low_water', int(low))
return low
