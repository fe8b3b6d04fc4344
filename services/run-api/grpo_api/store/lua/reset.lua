-- Delete the run, and make its receipts invalid.
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
-- INCR comes last: with full memory Redis rejects it unless the script has deleted a key
redis.call('INCR', KEYS[1])
