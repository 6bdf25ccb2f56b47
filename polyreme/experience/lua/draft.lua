#!lua
-- draft: saves parts of the partial rollouts of attempts in flight. A part replaces all parts from its number on, so a repeated part
-- changes nothing. Attempts that are not in flight are ignored.
-- KEYS: common. Writes drafts.
-- ARGV: term of the groups' orchestrator, then (index, attempt, number, bytes) of each part. Returns the number of saved parts.
for at = 2, #ARGV, 4 do
  local stale = refused(maker(tonumber(ARGV[at])), ARGV[1])
  if stale then return stale end
end
local kept = 0
for at = 2, #ARGV, 4 do
  local index, attempt, number = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local r = row(index)
  if r and r.state == 'admitted' and r.attempt == attempt then
    local _, parts = draft(index)
    if number > parts then
      return redis.error_reply('ORDER part ' .. int(number) .. ' of group ' .. int(index) .. ' cannot follow ' .. int(parts) .. ' parts')
    end
    cut_draft(index, number)
    redis.call('HSET', DRAFTS, int(index) .. ':' .. int(number), ARGV[at + 3])
    redis.call('HSET', DRAFTS, int(index), int(attempt) .. ' ' .. int(number + 1))
    kept = kept + 1
  end
end
return kept
