-- Forget the run, and that of its receipts that counted before.
--
-- KEYS  1 resets (string), then every key of the run's state, in each layout
-- Returns nothing

for i = 2, #KEYS do
  if string.find(KEYS[i], ':large$') then
    for _, staged in ipairs(redis.call('HVALS', KEYS[i])) do
      redis.call('UNLINK', staged)
    end
  end
  redis.call('UNLINK', KEYS[i])
end
-- last: where memory is full, Redis refuses this unless something was deleted before
redis.call('INCR', KEYS[1])
