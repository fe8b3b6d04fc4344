-- Lease the planned groups as one batch and count the step, if the plan still holds.
--
-- KEYS  1 trainer (hash)  2 lease (hash)              3 payloads (hash)
--       4 queue (zset)    5 sequences_by_env (hash)   6 sequences_by_size (hash)
-- ARGV  1 poll id  2 trainer id at planning  3 sequences in the batch, then group ids
-- Returns {'superseded'}   a trainer registered, or the run was reset, since the poll began
--         {'moved'}        another poll leased a batch or took one of the groups: plan again
--         {'leased', step, sequences, payload, ...}
--
-- Repeating a call whose answer was lost leases the same batch.

local trainer, lease, payloads, queue, by_env, by_size = unpack(KEYS)
local poll, trainer_id, sequences = ARGV[1], ARGV[2], ARGV[3]

local function decrease(counters, field, by)
  if redis.call('HINCRBY', counters, field, -by) == 0 then
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
  local entries = {}
  for i = 4, #ARGV do
    local entry = redis.call('ZRANGEBYSCORE', queue, ARGV[i], ARGV[i])[1]
    if not entry then
      return {'moved'}
    end
    table.insert(entries, entry)
  end
  for _, entry in ipairs(entries) do
    local env_id, size = string.match(entry, '^%d+ (%S+) (%d+) %d+$')
    redis.call('ZREM', queue, entry)
    decrease(by_env, env_id, size)
    decrease(by_size, size, size)
  end
  redis.call(
    'HSET', lease,
    'poll', poll,
    'groups', table.concat(ARGV, ' ', 4),
    'sequences', sequences,
    'step', redis.call('HINCRBY', trainer, 'step', 1)
  )
end

local reply = {'leased', tonumber(redis.call('HGET', lease, 'step')), tonumber(sequences)}
for id in string.gmatch(redis.call('HGET', lease, 'groups'), '%d+') do
  table.insert(reply, redis.call('HGET', payloads, id))
end
return reply
