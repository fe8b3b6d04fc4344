-- Lease the planned bundles as one batch and count the step, if the plan still holds.
--
-- KEYS  1 trainer (hash)  2 lease (hash)         3 payloads (hash)
--       4 queue (zset)    5 queued_kinds (hash)  6 queued_sizes (hash)
-- ARGV  1 poll id  2 trainer id at planning  3 sequences in the batch, then entries of the queue
-- Returns {'superseded'}   a trainer registered, or the run was reset, since the poll began
--         {'moved'}        another poll leased a batch or took one of the bundles: plan again
--         {'leased', step, sequences, payload, ...}
--
-- Repeating a call whose answer was lost leases the same batch.

local trainer, lease, payloads, queue, kinds, sizes = unpack(KEYS)
local poll, trainer_id, sequences = ARGV[1], ARGV[2], ARGV[3]

local function decrease(counters, field)
  if redis.call('HINCRBY', counters, field, -1) == 0 then
    redis.call('HDEL', counters, field)
  end
end

if redis.call('HGET', trainer, 'id') ~= trainer_id then
  return {'superseded'}
end
local handed_to = redis.call('HGET', lease, 'poll')
if handed_to and handed_to ~= poll then
  return {'moved'}
end

if not handed_to then
  for i = 4, #ARGV do
    if not redis.call('ZSCORE', queue, ARGV[i]) then
      return {'moved'}
    end
  end
  local ids = {}
  for i = 4, #ARGV do
    local kind, groups = string.match(ARGV[i], '^(%S+ %d+) %d+ (%S+)$')
    redis.call('ZREM', queue, ARGV[i])
    decrease(kinds, kind)
    for id, size in string.gmatch(groups, '(%d+):(%d+):%d+') do
      decrease(sizes, size)
      table.insert(ids, id)
    end
  end
  redis.call(
    'HSET', lease,
    'poll', poll,
    'groups', table.concat(ids, ' '),
    'sequences', sequences,
    'step', redis.call('HINCRBY', trainer, 'step', 1)
  )
end

local reply = {'leased', tonumber(redis.call('HGET', lease, 'step')), tonumber(sequences)}
for id in string.gmatch(redis.call('HGET', lease, 'groups'), '%d+') do
  table.insert(reply, redis.call('HGET', payloads, id))
end
return reply
