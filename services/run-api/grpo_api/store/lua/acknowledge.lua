-- Delete every batch up to one: the trainer's checkpoint includes them.
--
-- ARGV  1 trainer id, or '' for a plain poll, which acknowledges every delivered batch
--       2 id of the last batch to acknowledge; '' for a plain poll
-- Returns {'unregistered'}
--         {'superseded'}                  another trainer has registered
--         {'by lease'}                    a plain poll, in a run whose trainer uses leases
--         {'unknown', last batch}         no batch has this id
--         {'acknowledged', last acknowledged batch, number of batches deleted by this call}

local asking, through = ARGV[1], ARGV[2]

local refused = refusal(asking, through)
if refused then
  return refused
end

local last, acknowledged = number(trainer, 'last_batch'), number(trainer, 'acknowledged')

local function is_done(batch_id)
  if asking ~= '' then
    return tonumber(batch_id) <= tonumber(through)
  end
  return string.find(redis.call('HGET', answers, batch_id) or '', ' delivered$')
end

local latest_id = redis.call('HGET', latest, 'id')
local bytes = 0

local function release(batch_id)
  local lease = redis.call('HGET', leases, batch_id)
  -- HDEL must be the first write: with full memory Redis rejects a script whose first write may
  -- need more memory, and this script frees memory
  redis.call('HDEL', leases, batch_id)
  redis.call('HDEL', answers, batch_id)
  for id, stored in string.gmatch(lease, '(%d+):%d+:(%d+)') do
    bytes = bytes + tonumber(stored)
    if id == latest_id then
      -- /latest_example still returns it; the next submission deletes it
      redis.call('HSET', latest, 'acknowledged', '1')
    else
      drop(id)
    end
  end
end

local released = 0
for _, batch_id in ipairs(redis.call('HKEYS', leases)) do
  if is_done(batch_id) then
    release(batch_id)
    released = released + 1
  end
end
if released > 0 then
  -- concurrent plain polls may finish in any order
  while acknowledged < last and redis.call('HEXISTS', leases, acknowledged + 1) == 0 do
    acknowledged = acknowledged + 1
  end
  redis.call('HSET', trainer, 'acknowledged', acknowledged)
  redis.call('HINCRBY', totals, 'leased_bytes', -bytes)
end
return {'acknowledged', acknowledged, released}
