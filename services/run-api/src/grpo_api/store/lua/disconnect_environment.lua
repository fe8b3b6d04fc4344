-- Disconnect an environment and drop its buffered parts.
--
-- KEYS  1 environments (hash)  2 connected (set)  3 buffers (hash)  4 payloads (hash)
--       5 totals (hash)        6 large (hash)
-- ARGV  1 env_id
-- Returns nil if no such environment has registered, else the number of dropped parts

local environments, connected, buffers, payloads, totals, large = unpack(KEYS)
local env_id = ARGV[1]

if redis.call('HEXISTS', environments, env_id) == 0 then
  return nil
end
redis.call('SREM', connected, env_id)
local dropped = 0
local parts = redis.call('HGET', buffers, env_id) or ''
for id, stored in string.gmatch(parts, '(%d+):%d+:(%d+)') do
  dropped = dropped + drop(payloads, large, id)
  redis.call('HINCRBY', totals, 'buffered_parts', -1)
  redis.call('HINCRBY', totals, 'buffered_bytes', -tonumber(stored))
end
redis.call('HDEL', buffers, env_id)
return dropped
