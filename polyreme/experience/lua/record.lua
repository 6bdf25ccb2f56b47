#!lua
-- record: adds a record of the training service about a model, for the observer. The record of a request is added once.
-- KEYS: common, then records (stream, bounded: model, line), lane as in submit. Writes both.
-- ARGV: model, line, sequence number of the request (-1: none), most records. Returns whether the record was added.
local records, lane, seq = KEYS[10], KEYS[11], tonumber(ARGV[3])
if seq >= 0 then
  if seq <= tonumber(redis.call('HGET', lane, 'recorded') or '-1') then return 0 end
  redis.call('HSET', lane, 'recorded', int(seq))
end
redis.call('XADD', records, 'MAXLEN', '~', ARGV[4], '*', 'model', ARGV[1], 'line', ARGV[2])
return 1
