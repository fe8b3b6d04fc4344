-- Carry out the placement of a submission: store its groups, queue bundles, change buffers.
--
-- KEYS  1 trainer (hash)       2 buffers (hash)       3 queue (zset)   4 payloads (hash)
--       5 queued_kinds (hash)  6 queued_sizes (hash)  7 latest (hash)  8 receipt (string)
-- ARGV  1 seconds to keep the receipt  2 trainer id at planning
--       3 plan (JSON): buffers [[env_id, before, after], ...], bundles [entry, ...]
--       4 id of the first payload, then payloads, numbered upwards
-- Returns 'placed'
--         'moved'   another trainer, or a buffer that is not as it was before: place again
--
-- The receipt makes a repeated call (its answer was lost) queue nothing twice.

local trainer, buffers, queue, payloads, kinds, sizes, latest, receipt = unpack(KEYS)
local receipt_s, trainer_id, first_id = ARGV[1], ARGV[2], tonumber(ARGV[4])
local plan = cjson.decode(ARGV[3])

if redis.call('EXISTS', receipt) == 1 then
  return 'placed'
end
if redis.call('HGET', trainer, 'id') ~= trainer_id then
  return 'moved'
end
for _, buffer in ipairs(plan.buffers) do
  if (redis.call('HGET', buffers, buffer[1]) or '') ~= buffer[2] then
    return 'moved'
  end
end

for i = 5, #ARGV do
  redis.call('HSET', payloads, first_id + i - 5, ARGV[i])
end
for _, buffer in ipairs(plan.buffers) do
  if buffer[3] == '' then
    redis.call('HDEL', buffers, buffer[1])
  else
    redis.call('HSET', buffers, buffer[1], buffer[3])
  end
end
local last_queued
for _, entry in ipairs(plan.bundles) do
  local kind, groups = string.match(entry, '^(%S+ %d+) %d+ (%S+)$')
  redis.call('ZADD', queue, 0, entry)
  redis.call('HINCRBY', kinds, kind, 1)
  for id, sequences in string.gmatch(groups, '(%d+):(%d+):%d+') do
    redis.call('HINCRBY', sizes, sequences, 1)
    last_queued = id
  end
end
if last_queued then
  -- the payload of the group that was the latest outlived its batch for /latest_example only
  if redis.call('HGET', latest, 'acknowledged') then
    redis.call('HDEL', payloads, redis.call('HGET', latest, 'id'))
    redis.call('HDEL', latest, 'acknowledged')
  end
  redis.call('HSET', latest, 'id', last_queued)
end
redis.call('SET', receipt, '1', 'EX', receipt_s)
return 'placed'
