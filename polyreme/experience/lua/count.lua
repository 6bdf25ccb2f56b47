#!lua flags=allow-oom
-- count: adds to counters of the training service. A command that is repeated because its answer was lost counts twice.
-- KEYS: common, then usage (hash: name and field -> amount). Writes it.
-- ARGV: field, amount, field, amount, ...
for place = 1, #ARGV, 2 do
  redis.call('HINCRBYFLOAT', KEYS[10], ARGV[place], ARGV[place + 1])
end
