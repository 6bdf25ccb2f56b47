#!lua
-- online_reward: open -> rewarded. The same reward again changes nothing.
-- KEYS: common, then online_open, online_rewarded, online_counts, and the session.
-- ARGV: id, reward, task ('': that of the session), '1' if a task is required. Returns `ok`, or why there is none: `unknown`, `dropped`,
-- `other` (it has another reward), `empty` (it has no turn), `task` (it has another task, or none).
local state, reward, task, turns = unpack(redis.call('HMGET', KEYS[13], 'state', 'reward', 'task', 'turns'))
if not state then return 'unknown' end
if state == 'dropped' then return state end
if state ~= 'open' then return reward == ARGV[2] and 'ok' or 'other' end
if turns == '0' then return 'empty' end
if ARGV[3] ~= '' and task ~= '' and task ~= ARGV[3] then return 'task' end
if task == '' then task = ARGV[3] end
if task == '' and ARGV[4] == '1' then return 'task' end
redis.call('HSET', KEYS[13], 'state', 'rewarded', 'reward', ARGV[2], 'task', task)
redis.call('ZREM', KEYS[10], ARGV[1])
redis.call('ZADD', KEYS[11], now_ms(), ARGV[1])
redis.call('HINCRBY', KEYS[12], 'rewarded', 1)
signal('reward', ARGV[1])
return 'ok'
