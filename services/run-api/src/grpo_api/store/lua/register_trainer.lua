-- Register a trainer, unless that changes the run's batch size in a state not approved of.
--
-- KEYS  1 trainer (hash)  2 connected (set)  3 queued_kinds (hash)  4 leases (hash)
--       5 answers (hash)
--       then trainer (hash) of each former layout
-- ARGV  1 registration (JSON)  2 batch_size  3 starting_step  4 trainer id
--       5 fingerprint of a state that the new batch size was found to suit, or ''
--       6 uuid of the run, where this registration begins one
-- Returns {'registered', step, uuid of the run}
--         {'differs', current batch_size, unacknowledged batches, fingerprint}
--         {'former layout'}   the run was stored by a version that writes it differently
--
-- The fingerprint covers what the batch size must suit: kinds in the queue, environments, leases.
-- Keeps queue, environments and step. What is not acknowledged is handed out again.

local trainer, connected, kinds, leases, answers = unpack(KEYS)
local registration, batch_size, starting_step, trainer_id, approved, run_uuid = unpack(ARGV)

local function sorted(command, key)
  local members = redis.call(command, key)
  table.sort(members)
  return table.concat(members, ',')
end

local current = redis.call('HGET', trainer, 'batch_size')
for i = 6, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    return {'former layout'}
  end
end
local unacknowledged = redis.call('HLEN', leases)
if current and current ~= batch_size then
  local fingerprint = table.concat(
    {current, unacknowledged, sorted('HKEYS', kinds), sorted('SMEMBERS', connected)}, '|'
  )
  if fingerprint ~= approved then
    return {'differs', tonumber(current), unacknowledged, fingerprint}
  end
end

-- the first write: where memory is full Redis refuses a script that begins with one which may need
-- more, and without a trainer nothing is ever let go of
redis.call('HDEL', trainer, 'takes_leases')
redis.call('UNLINK', answers)
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
