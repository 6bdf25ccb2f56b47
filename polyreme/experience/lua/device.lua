#!lua flags=allow-oom
-- device: claims the run's devices, renews a grant, or releases it.
-- Any number of holders may have `generate` at once; `train` excludes `generate` and other holders. While a claim of `train` waits, no
-- further `generate` is granted. An entry past its deadline ends when another process needs the devices, so an outage of Redis alone ends
-- none.
-- KEYS: common, then device (hash): counter -> number of grants so far; USE:HOLDER -> "COUNTER DEADLINE_MS", COUNTER 0 while a claim waits.
-- ARGV: ask or give, use, holder, the counter of the holder's grant (0: none), ttl in ms. Writes device.
-- Returns {counter of the grant (0: none yet), 1 when a claim of `train` waits for this holder, the learner's version, the others ...}.
local DEVICE, use, holder, counter = KEYS[10], ARGV[2], ARGV[3], tonumber(ARGV[4])
local field, now = use .. ':' .. holder, now_ms()
local mine = tonumber(string.match(redis.call('HGET', DEVICE, field) or '-1', '^%-?%d+'))
if counter > 0 and mine ~= counter then
  return redis.error_reply('STALEGRANT grant ' .. int(counter) .. ' of ' .. field .. ' has ended')
end
if ARGV[1] == 'give' then
  if redis.call('HDEL', DEVICE, field) == 1 then signal('device', 'given up by ' .. field) end
  return {0, 0, meta('version')}
end

-- The other entries that exclude this use. For a holder of `generate` this is a claim of `train`, for which it should release the devices.
local others, trains = {}, false
local entries = redis.call('HGETALL', DEVICE)
for at = 1, #entries, 2 do
  local name, deadline = entries[at], tonumber(string.match(entries[at + 1], ' (%d+)$'))
  if deadline and name ~= field and (use == 'train' or string.sub(name, 1, 6) == 'train:') then
    if deadline > now then
      others[#others + 1] = name
      trains = trains or string.sub(name, 1, 6) == 'train:'
    else
      redis.call('HDEL', DEVICE, name)
      signal('device', 'ended: ' .. name)
    end
  end
end

local deadline = ' ' .. int(now + tonumber(ARGV[5]))
if mine > 0 then
  redis.call('HSET', DEVICE, field, int(mine) .. deadline)
elseif #others == 0 then
  mine = redis.call('HINCRBY', DEVICE, 'counter', 1)
  redis.call('HSET', DEVICE, field, int(mine) .. deadline)
  signal('device', 'granted to ' .. field)
elseif use == 'train' and not trains then
  redis.call('HSET', DEVICE, field, '0' .. deadline)
  if mine < 0 then signal('device', 'claimed by ' .. field) end
  mine = 0
else
  mine = 0
end
return {mine, (mine > 0 and #others > 0) and 1 or 0, meta('version'), unpack(others)}
