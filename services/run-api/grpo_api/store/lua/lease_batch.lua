-- Lease the planned entries as one batch and count the step, if the plan still holds.
--
-- ARGV  1 claim of a plain poll, or ''  2 trainer id at planning  3 batch id
--       4 sequences in the batch, then entries of the queue
-- Returns {'superseded'}     a trainer registered, or the run was reset, since the poll began
--         {'moved'}          an entry has left the queue, or another poll has the batch: plan
--                            again
--         {'leased', lease}  by this call, or by an earlier one with the same batch id
--
-- Repeating a call whose answer was lost leases no other batch.

local claim, trainer_id, batch_id, sequences = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local first = 5

local function decrease(counters, field)
  if redis.call('HINCRBY', counters, field, -1) == 0 then
    redis.call('HDEL', counters, field)
  end
end

if redis.call('HGET', trainer, 'id') ~= trainer_id then
  return {'superseded'}
end
local leased = redis.call('HGET', leases, batch_id)
if leased and (claim == '' or redis.call('HGET', answers, batch_id) == claim) then
  return {'leased', leased}
end
if tonumber(redis.call('HGET', trainer, 'last_batch') or 0) ~= batch_id - 1 then
  return {'moved'}
end
for i = first, #ARGV do
  if not redis.call('ZSCORE', queue, ARGV[i]) then
    return {'moved'}
  end
end

local groups, bytes, oldest = {}, 0, nil
for i = first, #ARGV do
  local kind, members, queued_ms = string.match(ARGV[i], '^(%S+ %d+) %d+ (%S+) (%d+)$')
  -- ZREM must be the first write: with full memory Redis rejects a script whose first write may
  -- need more memory, and only batches that are handed out are ever deleted
  redis.call('ZREM', queue, ARGV[i])
  decrease(queued_kinds, kind)
  for size, stored in string.gmatch(members, '%d+:(%d+):(%d+)') do
    decrease(queued_sizes, size)
    redis.call('HINCRBY', totals, 'queued_groups', -1)
    bytes = bytes + tonumber(stored)
  end
  table.insert(groups, members)
  if not oldest or tonumber(queued_ms) < tonumber(oldest) then
    oldest = queued_ms
  end
end
redis.call('HINCRBY', totals, 'queued_sequences', -tonumber(sequences))
redis.call('HINCRBY', totals, 'queued_bytes', -bytes)
redis.call('HINCRBY', totals, 'leased_bytes', bytes)

local step = redis.call('HINCRBY', trainer, 'step', 1)
local lease = table.concat({step, sequences, now(), oldest, table.concat(groups, ',')}, ' ')
redis.call('HSET', leases, batch_id, lease)
redis.call('HSET', trainer, 'last_batch', batch_id)
if claim ~= '' then
  redis.call('HSET', answers, batch_id, claim)
end
return {'leased', lease}
