-- Carry out the placement of a submission: store its groups, queue entries, change buffers.
--
-- KEYS  of this call: the receipt
-- ARGV  1 seconds to keep the receipt  2 receipt  3 limit on queued groups
--       4 limit on stored bytes, queued and buffered
--       5 prefix of staged payloads, '' if the payloads are in ARGV
--       6 trainer id at planning
--       7 plan (JSON): buffers [[env_id, before, after], ...], entries [entry, ...]
--       8 id of the first payload; the others follow
--       9 items that are used with these groups, as add_positions reads them
--       then per group: env_id or '-', sequences, stored bytes, payload or name of a staged one
-- Returns {'placed', id of the last group}
--         {'repeated', receipt}  an earlier call was carried out under the same receipt
--         {'full'}               the queue has reached a limit
--         {'unstaged'}           a staged payload has expired
--         {'moved'}              the trainer or a buffer has changed: place again

local receipt = own_keys[1]
local staged, trainer_id, plan = ARGV[5], ARGV[6], cjson.decode(ARGV[7])
local first_id, first = tonumber(ARGV[8]), 10

local function count(field, by)
  if by ~= 0 then
    redis.call('HINCRBY', totals, field, by)
  end
end

local run, answer = find_receipt(receipt)
if answer then
  return {'repeated', answer}
end
if redis.call('HGET', trainer, 'id') ~= trainer_id then
  return {'moved'}
end
for _, buffer in ipairs(plan.buffers) do
  if (redis.call('HGET', buffers, buffer[1]) or '') ~= buffer[2] then
    return {'moved'}
  end
end
if number(totals, 'queued_groups') >= tonumber(ARGV[3])
    or number(totals, 'queued_bytes') + number(totals, 'buffered_bytes') >= tonumber(ARGV[4]) then
  return {'full'}
end

for i = first, #ARGV, 4 do
  if staged ~= '' and redis.call('STRLEN', staged .. ARGV[i + 3]) ~= tonumber(ARGV[i + 2]) then
    return {'unstaged'}
  end
end

for i = first, #ARGV, 4 do
  local id = first_id + (i - first) / 4
  store(id, staged, ARGV[i + 3])
end

local function count_buffered(groups, sign)
  for stored in string.gmatch(groups, '%d+:%d+:(%d+)') do
    count('buffered_parts', sign)
    count('buffered_bytes', sign * tonumber(stored))
  end
end

for _, buffer in ipairs(plan.buffers) do
  count_buffered(buffer[2], -1)
  count_buffered(buffer[3], 1)
  if buffer[3] == '' then
    redis.call('HDEL', buffers, buffer[1])
  else
    redis.call('HSET', buffers, buffer[1], buffer[3])
  end
end

local now_ms = now()
local last_queued
for _, entry in ipairs(plan.entries) do
  local kind, groups = string.match(entry, '^(%S+ %d+) %d+ (%S+)$')
  redis.call('ZADD', queue, 0, entry .. ' ' .. now_ms)
  redis.call('HINCRBY', queued_kinds, kind, 1)
  for id, sequences, stored in string.gmatch(groups, '(%d+):(%d+):(%d+)') do
    redis.call('HINCRBY', queued_sizes, sequences, 1)
    count('queued_groups', 1)
    count('queued_sequences', tonumber(sequences))
    count('queued_bytes', tonumber(stored))
    last_queued = id
  end
end
if last_queued then
  set_latest(last_queued)
end
add_positions(ARGV[9])
redis.call('SET', receipt, run .. ' ' .. ARGV[2], 'EX', ARGV[1])
return {'placed', first_id + (#ARGV - first + 1) / 4 - 1}
