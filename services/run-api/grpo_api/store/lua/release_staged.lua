-- Delete staged payloads that were not queued: those that still expire.
--
-- KEYS  of this call: staged payloads (strings)
-- Returns nothing

for _, key in ipairs(own_keys) do
  if redis.call('TTL', key) >= 0 then
    redis.call('UNLINK', key)
  end
end
