-- Register an environment once the trainer has started.
--
-- KEYS  1 trainer (hash)  2 environments (hash)  3 environment_names (hash)
--       4 name_counts (hash)  5 connected (set)  6 seen (hash)  7 group_sizes (hash)
--       8 resets (string)       9 receipt (string)
-- ARGV  1 registration (JSON)  2 desired_name  3 group_size  4 seconds to keep the receipt
-- Returns {'wait'}                    no trainer has registered and polled yet
--         {'unservable', batch_size}  the group size does not divide the batch size
--         {'registered', env_id, name, step, trainer's registration (JSON)}
--
-- With the receipt, repeating a call whose answer was lost returns the same environment.

local trainer, environments, names, counts, connected, seen, group_sizes, resets,
  receipt = unpack(KEYS)
local registration, desired_name, group_size, receipt_s = unpack(ARGV)

local batch_size = tonumber(redis.call('HGET', trainer, 'batch_size'))
if not batch_size then
  return {'wait'}
end
if batch_size % tonumber(group_size) ~= 0 then
  return {'unservable', batch_size}
end
if not redis.call('HGET', trainer, 'started') then
  return {'wait'}
end

local run, env_id = find_receipt(resets, receipt)
if not env_id then
  env_id = redis.call('HLEN', environments)
  local ordinal = redis.call('HINCRBY', counts, desired_name, 1) - 1
  redis.call('HSET', environments, env_id, registration)
  redis.call('HSET', names, env_id, desired_name .. '_' .. ordinal)
  redis.call('HSET', group_sizes, env_id, group_size)
  redis.call('SADD', connected, env_id)
  redis.call('HSET', seen, env_id, now())
  redis.call('SET', receipt, run .. ' ' .. env_id, 'EX', receipt_s)
end
return {
  'registered',
  tonumber(env_id),
  redis.call('HGET', names, env_id),
  tonumber(redis.call('HGET', trainer, 'step')),
  redis.call('HGET', trainer, 'registration'),
}
