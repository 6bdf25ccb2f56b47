-- Prepended to every script. Every script gets the same keys of one run, in this order (scripts.py, KEYS):
--   meta       hash   state, reason, creator (nonce of the newest start), start (their number), limits (groups_per_iteration,
--   max_staleness, max_attempts, iterations, orchestrators), first_group (0 except in a fork), base, version,
--                     released, evaluated, low_water, recorded (newest iteration whose samples are on disk), version_since,
--                     orchestrator_since, orchestrator-1_since, ... (ms)
--   terms      hash   role -> "counter token" of its holder: learner; orchestrator, orchestrator-1, ...
--   ledger     hash   index -> row, one of
--                       admitted ATTEMPT VERSION SINCE_MS (`paused` while it waits for the learner's next version) | appended ATTEMPT OLDEST_VERSION MEAN_REWARD
--                       planned ATTEMPT OLDEST_VERSION ITERATION | dropped ATTEMPT MEAN_REWARD REASON (MEAN_REWARD is - if nothing was
--                       sampled) | failed ATTEMPT REASON
--   in_flight  zset   padded index, by the version it was admitted at: the rows `admitted`
--   appended   zset   padded index, by its oldest token's version: the rows `appended`
--   plans      hash   iteration -> "INDEX INDEX ..."
--   payloads   hash   index -> serialised group: the rows `appended`, and `planned` beyond `released`
--   drafts     hash   what the rows `admitted` have generated so far: index -> "ATTEMPT PARTS", INDEX:PART -> serialised group
--   events     stream wake-up signals, bounded; not authoritative
local META, TERMS, LEDGER, IN_FLIGHT, APPENDED, PLANS, PAYLOADS, DRAFTS, EVENTS = unpack(KEYS, 1, 9)

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function meta(field)
  return tonumber(redis.call('HGET', META, field) or '-1')
end

-- Iterations that have a plan. `base` is the version that an empty log began at.
local function planned()
  return meta('base') + redis.call('HLEN', PLANS)
end

local function int(n)
  return string.format('%d', n)
end

-- Members of equal length are in numeric order within one score.
local function member(index)
  return string.format('%012d', index)
end

local function row(index)
  local text = redis.call('HGET', LEDGER, int(index))
  if not text then return nil end
  local words = {}
  for word in string.gmatch(text, '%S+') do words[#words + 1] = word end
  return {state = words[1], attempt = tonumber(words[2]), third = tonumber(words[3]), text = text}
end

local function write(index, ...)
  redis.call('HSET', LEDGER, int(index), table.concat({...}, ' '))
end

-- `stream`: in place of the run's events.
local function signal(kind, value, stream)
  redis.call('XADD', stream or EVENTS, 'MAXLEN', '~', '1000', '*', 'kind', kind, 'value', tostring(value))
end

-- The number of orchestrators; a log of an older release does not have it.
local function orchestrators()
  return math.max(1, meta('orchestrators'))
end

-- The role of an orchestrator by its number; the first one leads.
local function orchestrator(number)
  return number == 0 and 'orchestrator' or 'orchestrator-' .. int(number)
end

-- The role of the orchestrator that makes a group.
local shards
local function maker(index)
  shards = shards or orchestrators()
  return orchestrator(index % shards)
end

-- The error to answer when `term` no longer holds the role, else nil.
local function refused(role, term)
  local holder = redis.call('HGET', TERMS, role)
  if holder == term then return nil end
  return redis.error_reply('STALETERM ' .. role .. ' is held by ' .. (holder or 'nobody'))
end

-- The draft of `index`: its attempt and its number of parts; both 0 when there is none.
local function draft(index)
  local attempt, parts = string.match(redis.call('HGET', DRAFTS, int(index)) or '0 0', '^(%d+) (%d+)$')
  return tonumber(attempt), tonumber(parts)
end

-- Deletes the parts of a draft from number `first` on; 0 deletes the whole draft.
local function cut_draft(index, first)
  local attempt, parts = draft(index)
  for number = first, parts - 1 do redis.call('HDEL', DRAFTS, int(index) .. ':' .. int(number)) end
  if first == 0 then
    redis.call('HDEL', DRAFTS, int(index))
  elseif first < parts then
    redis.call('HSET', DRAFTS, int(index), int(attempt) .. ' ' .. int(first))
  end
end

-- Counts a scored group in the hash `rates` (prompt -> "SAMPLES SOLVED STREAK"); without a prompt, nothing.
local function count_tally(rates, prompt, samples, solved)
  if prompt == '' then return end
  local before = redis.call('HGET', rates, prompt) or '0 0 0'
  local all, passed, streak = string.match(before, '^(%d+) (%d+) (-?%d+)$')
  local n, k = tonumber(samples), tonumber(solved)
  if k == n then streak = math.max(0, tonumber(streak)) + n
  elseif k == 0 then streak = math.min(0, tonumber(streak)) - n
  else streak = 0 end
  redis.call('HSET', rates, prompt, int(all + n) .. ' ' .. int(passed + k) .. ' ' .. int(streak))
end

-- Marks the groups in flight of an orchestrator that are in `paused` (index -> true). Marked groups of it that are not in it continue.
local function mark_paused(paused, role)
  local marked, now = 0, int(now_ms())
  for _, m in ipairs(redis.call('ZRANGE', IN_FLIGHT, 0, -1)) do
    local index = tonumber(m)
    if maker(index) == role then
      local r = row(index)
      local was = string.match(r.text, 'paused$') ~= nil
      if paused[index] then marked = marked + 1 end
      if was ~= (paused[index] == true) then
        write(index, 'admitted', int(r.attempt), int(r.third), was and now or 'paused')
      end
    end
  end
  return marked
end

-- admitted (row `r`) -> admitted with the next attempt, or failed after the last one. Returns the new attempt, or nil.
-- The version is the current one, or the group's previous one if that is newer, as while a resumed learner catches up.
local function next_attempt(index, r, reason, max_attempts)
  cut_draft(index, 0)
  if r.attempt >= max_attempts then
    redis.call('ZREM', IN_FLIGHT, member(index))
    write(index, 'failed', int(r.attempt), reason)
    signal('fail', int(index))
    return nil
  end
  local version = math.max(r.third, meta('version'))
  redis.call('ZADD', IN_FLIGHT, version, member(index))
  write(index, 'admitted', int(r.attempt + 1), int(version), int(now_ms()))
  return r.attempt + 1
end
