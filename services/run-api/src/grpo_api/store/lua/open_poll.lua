-- Begin a poll for a batch: hand out again what the trainer does not hold yet, or ask for a plan.
--
-- KEYS  1 trainer (hash)  2 leases (hash)  3 totals (hash)  4 answers (hash)
-- ARGV  1 trainer id, or '' for a trainer that cannot acknowledge (a plain poll)
--       2 id of the last batch that it holds; a plain poll: '', it holds what was delivered
--       3 most bytes that unacknowledged batches may hold
--       4 how many batches the run needs after ARGV 2, or '' where the trainer does not say
--       5 name of the answer to a plain poll
-- Returns {'unregistered'}
--         {'superseded'}                     another trainer has registered
--         {'by lease'}                       a plain poll, while the run's trainer takes leases
--         {'unknown', last batch}            no batch has the id of ARGV 2
--         {'full', bytes}                    nothing new before batches are acknowledged
--         {'leased', batch id, lease}                  the next batch that is not acknowledged; a
--                                            plain poll: nor being sent in another answer
--         {'open', trainer id, batch_size, batch id}   nothing more is leased: plan this one

local trainer, leases, totals, answers = unpack(KEYS)
local asking, after, max_bytes, batches_left = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local answer = ARGV[5]

-- Where memory is full Redis refuses what may need more as a script's first write. Batches have to
-- be handed out there too, or none is ever let go of: deleting comes first.
local function set(field, value)
  redis.call('HDEL', trainer, field)
  redis.call('HSET', trainer, field, value)
end

local function set_once(field)
  if redis.call('HEXISTS', trainer, field) == 0 then
    set(field, '1')
  end
end

local refused = refusal(trainer, asking, after)
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
  local sent_in = asking == '' and redis.call('HGET', answers, batch_id)
  if not sent_in or sent_in == answer then
    return true
  end
  -- nobody listens: the answer was cut off, or its server is gone
  return not string.find(sent_in, ' delivered$')
    and redis.call('PUBSUB', 'NUMSUB', sent_in)[2] == 0
end

local last = number(trainer, 'last_batch')
local next_id = math.max(tonumber(after) or 0, number(trainer, 'acknowledged')) + 1
while next_id <= last and not is_free(next_id) do
  next_id = next_id + 1
end
if batches_left == '' then
  redis.call('HDEL', trainer, 'ends_at')
else
  -- steps count batches, and of those that are leased this trainer takes next_id and later ones
  local ends_at = number(trainer, 'step') - (last - next_id + 1) + tonumber(batches_left)
  if number(trainer, 'ends_at') ~= ends_at then
    set('ends_at', ends_at)
  end
end
if next_id <= last then
  set('redeliveries', number(trainer, 'redeliveries') + 1)
  if asking == '' then
    redis.call('HDEL', answers, next_id)
    redis.call('HSET', answers, next_id, answer)
  end
  return {'leased', next_id, redis.call('HGET', leases, next_id)}
end
local leased_bytes = number(totals, 'leased_bytes')
if leased_bytes >= max_bytes then
  return {'full', leased_bytes}
end
local trainer_id, batch_size = unpack(redis.call('HMGET', trainer, 'id', 'batch_size'))
return {'open', trainer_id, tonumber(batch_size), next_id}
