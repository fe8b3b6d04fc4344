-- Queue groups, all of them or none.
--
-- KEYS  1 trainer (hash)   2 environments (hash)       3 queue (zset: metadata by id)
--       4 payloads (hash)  5 sequences_by_env (hash)   6 sequences_by_size (hash)
--       7 latest (hash)    8 last_group_id (string)    9 receipt (string)
-- ARGV  1 seconds to keep the receipt, then for each group: env_id or '-', sequences, payload
-- Returns {'queued'}
--         {'unregistered'}                                no trainer has registered
--         {'indivisible', index, sequences, batch_size}   no batch can hold the group
--         {'mixed', index, sequences, group_size}         not the size its environment registered
--
-- A queue entry reads "id env_id sequences stored_bytes". The receipt makes a repeated call (its
-- answer was lost) queue nothing twice.

local trainer, environments, queue, payloads = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local by_env, by_size, latest, last_id, receipt = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]

if redis.call('EXISTS', receipt) == 1 then
  return {'queued'}
end
local batch_size = tonumber(redis.call('HGET', trainer, 'batch_size'))
if not batch_size then
  return {'unregistered'}
end
for i = 2, #ARGV, 3 do
  local index, sequences = (i - 2) / 3, tonumber(ARGV[i + 1])
  if batch_size % sequences ~= 0 then
    return {'indivisible', index, sequences, batch_size}
  end
  local environment = redis.call('HGET', environments, ARGV[i])
  if environment then
    local group_size = cjson.decode(environment).group_size
    if group_size ~= sequences then
      return {'mixed', index, sequences, group_size}
    end
  end
end

local id
for i = 2, #ARGV, 3 do
  local env_id, sequences, payload = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  id = redis.call('INCR', last_id)
  redis.call('HSET', payloads, id, payload)
  redis.call('ZADD', queue, id, id .. ' ' .. env_id .. ' ' .. sequences .. ' ' .. #payload)
  redis.call('HINCRBY', by_env, env_id, sequences)
  redis.call('HINCRBY', by_size, sequences, sequences)
end
if id then
  -- the payload of the group that was the latest outlived its batch for /latest_example only
  if redis.call('HGET', latest, 'acknowledged') then
    redis.call('HDEL', payloads, redis.call('HGET', latest, 'id'))
    redis.call('HDEL', latest, 'acknowledged')
  end
  redis.call('HSET', latest, 'id', id)
end
redis.call('SET', receipt, '1', 'EX', ARGV[1])
return {'queued'}
