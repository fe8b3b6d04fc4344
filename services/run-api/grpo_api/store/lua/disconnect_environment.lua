-- Delete an environment that leaves, and its buffered parts.
--
-- KEYS  1 environments (hash)  2 environment_names (hash)  3 group_sizes (hash)  4 connected (set)
--       5 seen (hash)          6 buffers (hash)            7 payloads (hash)     8 totals (hash)
--       9 large (hash)         10 last_env_id (string)
-- ARGV  1 env_id
-- Returns nil if no such environment ever registered, else the number of dropped parts

local ids = redis.call('GET', KEYS[10]) or redis.call('HLEN', KEYS[1])
if tonumber(ARGV[1]) >= tonumber(ids) then
  return nil
end
return forget_environment(ARGV[1], unpack(KEYS))
