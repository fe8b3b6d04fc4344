-- What several scripts share. It is put in front of each of them.

local function number(key, field)
  return tonumber(redis.call('HGET', key, field) or 0)
end

-- Redis' time (ms), as it is written in keys
local function now()
  local time = redis.call('TIME')
  return string.format('%d%03d', time[1], math.floor(time[2] / 1000))
end

-- The run, and the answer that a call before this one left under the same receipt. It counts for
-- the run that it was written in, not for what follows a reset.
local function find_receipt(resets, receipt)
  local run = redis.call('GET', resets) or '0'
  local of_run, answer = string.match(redis.call('GET', receipt) or '', '^(%d+) (.*)$')
  return run, of_run == run and answer
end

-- Why a trainer may not ask about batches up to one; asking: its id, or '' for a plain poll
local function refusal(trainer, asking, batch_id)
  if redis.call('HEXISTS', trainer, 'batch_size') == 0 then
    return {'unregistered'}
  end
  if asking == '' then
    return redis.call('HEXISTS', trainer, 'takes_leases') == 1 and {'by lease'}
  end
  if asking ~= redis.call('HGET', trainer, 'id') then
    return {'superseded'}
  end
  local last = number(trainer, 'last_batch')
  return tonumber(batch_id) > last and {'unknown', last}
end

-- staged: prefix of staged payloads, where content is the name of one; else ''
local function store(payloads, large, id, staged, content)
  if staged == '' then
    redis.call('HSET', payloads, id, content)
  else
    redis.call('PERSIST', staged .. content)
    redis.call('HSET', large, id, staged .. content)
  end
end

-- Returns how many payloads were dropped
local function drop(payloads, large, id)
  local name = redis.call('HGET', large, id)
  if name then
    redis.call('UNLINK', name)
    return redis.call('HDEL', large, id)
  end
  return redis.call('HDEL', payloads, id)
end

local function set_latest(latest, payloads, large, id)
  -- the payload of the group that was the latest outlived its batch for /latest_example only
  if redis.call('HGET', latest, 'acknowledged') then
    drop(payloads, large, redis.call('HGET', latest, 'id'))
    redis.call('HDEL', latest, 'acknowledged')
  end
  redis.call('HSET', latest, 'id', id)
end

