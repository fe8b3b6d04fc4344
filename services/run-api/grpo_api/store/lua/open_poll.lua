-- Start a poll for a batch: return the next leased batch, or the state to plan a new one.
--
-- ARGV  1 trainer id, or '' for a plain poll, which cannot acknowledge
--       2 id of the last batch that the trainer holds; '' for a plain poll
--       3 limit on the stored bytes of unacknowledged batches
--       4 number of batches that the run needs after ARGV 2, or '' if unknown
--       5 claim of a plain poll
-- Returns {'unregistered'}
--         {'superseded'}                     another trainer has registered
--         {'by lease'}                       a plain poll, in a run whose trainer uses leases
--         {'unknown', last batch}            no batch has the id of ARGV 2
--         {'full', bytes}                    acknowledge batches first
--         {'leased', batch id, lease}        the next unacknowledged batch; for a plain poll, one
--                                            that no other poll has claimed
--         {'open', trainer id, batch_size, batch id}   no other batch is leased: plan this one

local asking, after, max_bytes, batches_left = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local claim = ARGV[5]

-- With full memory Redis rejects a script whose first write may need more memory. Batches must be
-- handed out even then, because only those are ever deleted. So HDEL comes first.
local function set(field, value)
  redis.call('HDEL', trainer, field)
  redis.call('HSET', trainer, field, value)
end

local function set_once(field)
  if redis.call('HEXISTS', trainer, field) == 0 then
    set(field, '1')
  end
end

local refused = refusal(asking, after)
if refused then
  return refused
end
if asking ~= '' then
  set_once('takes_leases')
end
set_once('started')

local function is_free(batch_id)
  if redis.call('HEXISTS', leases, batch_id) == 0 then
    return false
  end
  local claimed_by = asking == '' and redis.call('HGET', answers, batch_id)
  if not claimed_by or claimed_by == claim then
    return true
  end
  -- no listener: the answer was cut off, or its server process ended
  return not string.find(claimed_by, ' delivered$')
    and redis.call('PUBSUB', 'NUMSUB', claimed_by)[2] == 0
end

local last = number(trainer, 'last_batch')
local next_id = math.max(tonumber(after) or 0, number(trainer, 'acknowledged')) + 1
while next_id <= last and not is_free(next_id) do
  next_id = next_id + 1
end
if batches_left == '' then
  redis.call('HDEL', trainer, 'ends_at')
else
  -- steps count batches; of the leased ones, this trainer still receives next_id and later ones
  local ends_at = number(trainer, 'step') - (last - next_id + 1) + tonumber(batches_left)
  if number(trainer, 'ends_at') ~= ends_at then
    set('ends_at', ends_at)
  end
end
if next_id <= last then
  set('redeliveries', number(trainer, 'redeliveries') + 1)
  if asking == '' then
    redis.call('HDEL', answers, next_id)
    redis.call('HSET', answers, next_id, claim)
  end
  return {'leased', next_id, redis.call('HGET', leases, next_id)}
end
local leased_bytes = number(totals, 'leased_bytes')
if leased_bytes >= max_bytes then
  return {'full', leased_bytes}
end
local trainer_id, batch_size = unpack(redis.call('HMGET', trainer, 'id', 'batch_size'))
return {'open', trainer_id, tonumber(batch_size), next_id}
