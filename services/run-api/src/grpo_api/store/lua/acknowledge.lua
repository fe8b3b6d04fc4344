-- Let go of every batch up to one: they are durable with the trainer and never handed out again.
--
-- KEYS  1 trainer (hash)  2 leases (hash)  3 totals (hash)  4 payloads (hash)  5 latest (hash)
--       6 large (hash)    7 answers (hash)
-- ARGV  1 trainer id, or '' for a trainer that cannot acknowledge (a plain poll)
--       2 id of the last durable batch; a plain poll: '', everything that was delivered
-- Returns {'unregistered'}
--         {'superseded'}                  another trainer has registered
--         {'by lease'}                    a plain poll, while the run's trainer takes leases
--         {'unknown', last batch}         no batch has this id
--         {'acknowledged', batch id, batches let go by this call}

local trainer, leases, totals, payloads, latest, large, answers = unpack(KEYS)
local asking, through = ARGV[1], ARGV[2]

local refused = refusal(trainer, asking, through)
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

local function let_go(batch_id)
  local lease = redis.call('HGET', leases, batch_id)
  -- the first write: where memory is full Redis refuses a script that begins with one which may
  -- need more, and this is what frees memory
  redis.call('HDEL', leases, batch_id)
  redis.call('HDEL', answers, batch_id)
  for id, stored in string.gmatch(lease, '(%d+):%d+:(%d+)') do
    bytes = bytes + tonumber(stored)
    if id == latest_id then
      -- /latest_example still shows it; the next submission deletes it
      redis.call('HSET', latest, 'acknowledged', '1')
    else
      drop(payloads, large, id)
    end
  end
end

local released = 0
for _, batch_id in ipairs(redis.call('HKEYS', leases)) do
  if is_done(batch_id) then
    let_go(batch_id)
    released = released + 1
  end
end
if released > 0 then
  -- polls side by side are done in any order
  while acknowledged < last and redis.call('HEXISTS', leases, acknowledged + 1) == 0 do
    acknowledged = acknowledged + 1
  end
  redis.call('HSET', trainer, 'acknowledged', acknowledged)
  redis.call('HINCRBY', totals, 'leased_bytes', -bytes)
end
return {'acknowledged', acknowledged, released}
