-- Delete the run, and make its receipts invalid.
--
-- Returns nothing

-- so that nothing of this run is taken for the next run's
local kept = {[resets] = true, [last_group_id] = true, [last_env_id] = true, [start] = true}

for _, staged in ipairs(redis.call('HVALS', large)) do
  redis.call('UNLINK', staged)
end
for _, key in ipairs(KEYS) do
  if not kept[key] then
    redis.call('UNLINK', key)
  end
end
-- INCR comes last: with full memory Redis rejects it unless the script has deleted a key
redis.call('INCR', resets)
