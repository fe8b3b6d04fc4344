-- Forget the run, and that of its receipts that counted before.
--
-- KEYS  1 resets (string), then large (hash) of each layout, then every key of the run's state
-- ARGV  1 layouts that have large
-- Returns nothing

local state = 2 + tonumber(ARGV[1])
for i = 2, state - 1 do
  for _, staged in ipairs(redis.call('HVALS', KEYS[i])) do
    redis.call('UNLINK', staged)
  end
end
for i = state, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
-- last: where memory is full, Redis refuses this unless something was deleted before
redis.call('INCR', KEYS[1])
