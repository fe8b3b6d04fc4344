-- Functions shared by the scripts. The store puts this file in front of each script. Above it are a
-- local for each key of the run, with its name in keys.py, and own_keys: the keys of this call.

local function number(key, field)
  return tonumber(redis.call('HGET', key, field) or 0)
end

-- The clock of Redis in milliseconds, in the format that is stored
local function now()
  local time = redis.call('TIME')
  return string.format('%d%03d', time[1], math.floor(time[2] / 1000))
end

-- Returns the run's number, and the answer that an earlier call stored under the same receipt.
-- An answer from before a reset does not count.
local function find_receipt(receipt)
  local run = redis.call('GET', resets) or '0'
  local of_run, answer = string.match(redis.call('GET', receipt) or '', '^(%d+) (.*)$')
  return run, of_run == run and answer
end

-- Why a trainer's request about a batch is rejected. asking: its id, or '' for a plain poll
local function refusal(asking, batch_id)
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

-- staged: prefix of staged payloads if content is the name of one, else ''
local function store(id, staged, content)
  if staged == '' then
    redis.call('HSET', payloads, id, content)
  else
    redis.call('PERSIST', staged .. content)
    redis.call('HSET', large, id, staged .. content)
  end
end

-- Returns how many payloads were dropped
local function drop(id)
  local name = redis.call('HGET', large, id)
  if name then
    redis.call('UNLINK', name)
    return redis.call('HDEL', large, id)
  end
  return redis.call('HDEL', payloads, id)
end

local function set_latest(id)
  -- the previous latest group was kept after its acknowledgement only for /latest_example
  if redis.call('HGET', latest, 'acknowledged') then
    drop(redis.call('HGET', latest, 'id'))
    redis.call('HDEL', latest, 'acknowledged')
  end
  redis.call('HSET', latest, 'id', id)
end

-- Delete an environment and its buffered parts, which nothing can complete now. Groups of it in the
-- queue stay. Returns the number of dropped parts
local function forget_environment(env_id)
  redis.call('HDEL', environments, env_id)
  redis.call('HDEL', environment_names, env_id)
  redis.call('HDEL', group_sizes, env_id)
  redis.call('SREM', connected, env_id)
  redis.call('HDEL', seen, env_id)
  local dropped = 0
  local parts = redis.call('HGET', buffers, env_id) or ''
  for id, stored in string.gmatch(parts, '(%d+):%d+:(%d+)') do
    dropped = dropped + drop(id)
    redis.call('HINCRBY', totals, 'buffered_parts', -1)
    redis.call('HINCRBY', totals, 'buffered_bytes', -tonumber(stored))
  end
  redis.call('HDEL', buffers, env_id)
  return dropped
end

-- Adds ranges of used items to the stored ones. given: JSON, {name: 'first-last,first-last'}, or ''
local function add_positions(given)
  for name, added in pairs(given ~= '' and cjson.decode(given) or {}) do
    local ranges, joined = {}, {}
    local all = (redis.call('HGET', item_positions, name) or '') .. ',' .. added
    for first, last in string.gmatch(all, '(%d+)-(%d+)') do
      table.insert(ranges, {tonumber(first), tonumber(last)})
    end
    table.sort(ranges, function(a, b) return a[1] < b[1] end)
    for _, range in ipairs(ranges) do
      local before = joined[#joined]
      if before and range[1] <= before[2] + 1 then
        before[2] = math.max(before[2], range[2])
      else
        table.insert(joined, range)
      end
    end
    for i, range in ipairs(joined) do
      joined[i] = string.format('%d-%d', range[1], range[2])
    end
    redis.call('HSET', item_positions, name, table.concat(joined, ','))
  end
end
