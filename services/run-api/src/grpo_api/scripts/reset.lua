-- Forget the run, and that of its receipts that counted before.
--
-- KEYS  1 resets (string)  2 large (hash), then every key of the run's state
-- Returns nothing

for _, staged in ipairs(redis.call('HVALS', KEYS[2])) do
  redis.call('UNLINK', staged)
end
for i = 3, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
-- last: where memory is full, Redis refuses this unless something was deleted before
redis.call('INCR', KEYS[1])
