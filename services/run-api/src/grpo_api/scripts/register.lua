-- Register a trainer, unless what the run already holds cannot be served with its batch size.
--
-- KEYS  1 trainer (hash)  2 environments (hash)  3 connected (set)
--       4 lease (hash)    5 sequences_by_size (hash)
-- ARGV  1 registration (JSON)  2 batch_size  3 starting_step  4 trainer id
-- Returns {'registered', step}
--         {'conflict', current batch_size, reason, ...}
--
-- Keeps queue, environments and step. A batch that is not acknowledged is handed out again.

local trainer, environments, connected, lease, sizes = unpack(KEYS)
local batch_size = tonumber(ARGV[2])
local current = tonumber(redis.call('HGET', trainer, 'batch_size'))

if current and current ~= batch_size then
  local reasons = {}
  if redis.call('EXISTS', lease) == 1 then
    table.insert(reasons, 'a batch of ' .. current .. ' sequences is not acknowledged yet')
  end
  local by_size = redis.call('HGETALL', sizes)
  for i = 1, #by_size, 2 do
    if batch_size % tonumber(by_size[i]) ~= 0 then
      table.insert(reasons, by_size[i + 1] .. ' sequences are queued in groups of ' .. by_size[i])
    end
  end
  for _, env_id in ipairs(redis.call('SMEMBERS', connected)) do
    local group_size = cjson.decode(redis.call('HGET', environments, env_id)).group_size
    if batch_size % group_size ~= 0 then
      table.insert(reasons, 'environment ' .. env_id .. ' sends groups of ' .. group_size)
    end
  end
  if #reasons > 0 then
    return {'conflict', current, unpack(reasons, 1, math.min(#reasons, 20))}
  end
end

redis.call('HSET', trainer, 'registration', ARGV[1], 'batch_size', ARGV[2], 'id', ARGV[4])
redis.call('HSETNX', trainer, 'step', ARGV[3])
if redis.call('EXISTS', lease) == 1 then
  -- no poll has this id, so the next one is handed the batch instead of acknowledging it
  redis.call('HSET', lease, 'poll', '')
end
return {'registered', tonumber(redis.call('HGET', trainer, 'step'))}
