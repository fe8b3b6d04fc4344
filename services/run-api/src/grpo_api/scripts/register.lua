-- Register a trainer, unless that changes the run's batch size in a state not approved of.
--
-- KEYS  1 trainer (hash)  2 connected (set)  3 lease (hash)  4 queued_kinds (hash)
-- ARGV  1 registration (JSON)  2 batch_size  3 starting_step  4 trainer id
--       5 fingerprint of a state that the new batch size was found to suit, or ''
-- Returns {'registered', step}
--         {'differs', current batch_size, 1 where a batch is leased, fingerprint}
--
-- The fingerprint covers what the batch size must suit: kinds in the queue, environments, the lease.
-- Keeps queue, environments and step. A batch that is not acknowledged is handed out again.

local trainer, connected, lease, kinds = unpack(KEYS)
local registration, batch_size, starting_step, trainer_id, approved = unpack(ARGV)

local function sorted(command, key)
  local members = redis.call(command, key)
  table.sort(members)
  return table.concat(members, ',')
end

local is_leased = redis.call('EXISTS', lease)
local current = redis.call('HGET', trainer, 'batch_size')
if current and current ~= batch_size then
  local fingerprint = table.concat(
    {current, is_leased, sorted('HKEYS', kinds), sorted('SMEMBERS', connected)}, '|'
  )
  if fingerprint ~= approved then
    return {'differs', tonumber(current), is_leased, fingerprint}
  end
end

redis.call('HSET', trainer, 'registration', registration, 'batch_size', batch_size)
redis.call('HSET', trainer, 'id', trainer_id)
redis.call('HSETNX', trainer, 'step', starting_step)
if is_leased == 1 then
  -- no poll has this id, so the next one is handed the batch instead of acknowledging it
  redis.call('HSET', lease, 'poll', '')
end
return {'registered', tonumber(redis.call('HGET', trainer, 'step'))}
