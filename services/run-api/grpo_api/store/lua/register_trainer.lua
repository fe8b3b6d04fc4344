-- Register a trainer, unless that changes the run's batch size without approval.
--
-- ARGV  1 registration (JSON)  2 batch_size  3 starting_step  4 trainer id
--       5 fingerprint of a state for which the new batch size was approved, or ''
--       6 uuid for the run, if this registration starts one
-- Returns {'registered', step, uuid of the run}
--         {'differs', current batch_size, unacknowledged batches, fingerprint}
--
-- The fingerprint covers the kinds in the queue, the environments and the leases, because the batch
-- size must fit them. The queue, the environments and the step stay. Unacknowledged batches are
-- handed out again.

local registration, batch_size, starting_step, trainer_id, approved, run_uuid = unpack(ARGV)

local function sorted(command, key)
  local members = redis.call(command, key)
  table.sort(members)
  return table.concat(members, ',')
end

local current = redis.call('HGET', trainer, 'batch_size')
local unacknowledged = redis.call('HLEN', leases)
if current and current ~= batch_size then
  local fingerprint = table.concat(
    {current, unacknowledged, sorted('HKEYS', queued_kinds), sorted('SMEMBERS', connected)}, '|'
  )
  if fingerprint ~= approved then
    return {'differs', tonumber(current), unacknowledged, fingerprint}
  end
end

-- HDEL must be the first write: with full memory Redis rejects a script whose first write may need
-- more memory, and without a trainer no batch is ever deleted
redis.call('HDEL', trainer, 'takes_leases')
redis.call('UNLINK', answers, refusals)
redis.call(
  'HSET', trainer,
  'registration', registration,
  'batch_size', batch_size,
  'id', trainer_id
)
redis.call('HSETNX', trainer, 'step', starting_step)
redis.call('HSETNX', trainer, 'run_uuid', run_uuid)
local step, uuid = unpack(redis.call('HMGET', trainer, 'step', 'run_uuid'))
return {'registered', tonumber(step), uuid}
