-- Begin a poll for a batch: hand out again what was not received, or acknowledge what was.
--
-- KEYS  1 trainer (hash)  2 lease (hash)  3 payloads (hash)  4 latest (hash)
-- ARGV  1 poll id
-- Returns {'unregistered'}
--         {'leased', step, sequences, payload, ...}   the same batch, not counted again
--         {'open', trainer id, batch_size}            nothing is leased: plan the next batch
--
-- The lease names the poll it was handed to; '' stands for none, after a trainer registered again.

local trainer, lease, payloads, latest = unpack(KEYS)
local poll = ARGV[1]

local batch_size = redis.call('HGET', trainer, 'batch_size')
if not batch_size then
  return {'unregistered'}
end
redis.call('HSET', trainer, 'started', '1')

local handed_to = redis.call('HGET', lease, 'poll')
if handed_to then
  local groups = redis.call('HGET', lease, 'groups')
  if handed_to == '' or handed_to == poll then
    redis.call('HSET', lease, 'poll', poll)
    local reply = {
      'leased',
      tonumber(redis.call('HGET', lease, 'step')),
      tonumber(redis.call('HGET', lease, 'sequences')),
    }
    for id in string.gmatch(groups, '%d+') do
      table.insert(reply, redis.call('HGET', payloads, id))
    end
    return reply
  end
  local latest_id = redis.call('HGET', latest, 'id')
  for id in string.gmatch(groups, '%d+') do
    if id == latest_id then
      -- /latest_example still shows it; the next submission deletes it
      redis.call('HSET', latest, 'acknowledged', '1')
    else
      redis.call('HDEL', payloads, id)
    end
  end
  redis.call('DEL', lease)
end
return {'open', redis.call('HGET', trainer, 'id'), tonumber(batch_size)}
