-- Register an environment once the trainer has started.
--
-- KEYS  of this call: the receipt
-- ARGV  1 registration (JSON)  2 desired_name  3 group_size  4 seconds to keep the receipt
--       5 milliseconds without a poll after which an environment is deleted
-- Returns {'wait'}                    no trainer has registered and polled yet
--         {'unservable', batch_size}  the group size does not divide the batch size
--         {'registered', env_id, name, step, trainer's registration (JSON), uuid of the run,
--                                  names and used items of all environments}
--
-- With the receipt, repeating a call whose answer was lost returns the same environment.

local receipt = own_keys[1]
local registration, desired_name, group_size, receipt_s, gone_ms = unpack(ARGV)

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

local run, env_id = find_receipt(receipt)
if not env_id then
  local now_ms = tonumber(now())
  local polls = redis.call('HGETALL', seen)
  for i = 1, #polls, 2 do
    if now_ms - tonumber(polls[i + 1]) > tonumber(gone_ms) then
      forget_environment(polls[i])
    end
  end
  env_id = redis.call('INCR', last_env_id) - 1
  redis.call('HINCRBY', totals, 'environments', 1)
  local ordinal = redis.call('HINCRBY', name_counts, desired_name, 1) - 1
  redis.call('HSET', environments, env_id, registration)
  redis.call('HSET', environment_names, env_id, desired_name .. '_' .. ordinal)
  redis.call('HSET', group_sizes, env_id, group_size)
  redis.call('SADD', connected, env_id)
  redis.call('HSET', seen, env_id, now())
  redis.call('SET', receipt, run .. ' ' .. env_id, 'EX', receipt_s)
end
return {
  'registered',
  tonumber(env_id),
  redis.call('HGET', environment_names, env_id),
  tonumber(redis.call('HGET', trainer, 'step')),
  redis.call('HGET', trainer, 'registration'),
  redis.call('HGET', trainer, 'run_uuid'),
  redis.call('HGETALL', item_positions),
}
