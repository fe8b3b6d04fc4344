-- Queue groups that need no planning, the usual case. Each has the size that its environment
-- registered, or an unregistered sender, and its size divides the batch size.
--
-- KEYS  of this call: the receipt; served weights (hash, vllm-server's: epoch, step)
-- ARGV  1 seconds to keep the receipt  2 receipt  3 limit on queued groups
--       4 limit on stored bytes, queued and buffered
--       5 prefix of staged payloads, '' if the payloads are in ARGV
--       6 version under which the groups were received, as stored; '' for the one served now
--       7 uuid of the run for which the groups were sampled, '' if unknown
--       8 items that are used with these groups, as add_positions reads them
--       then per group: env_id or '-', sequences, stored bytes, payload or name of a staged one
-- Returns {'placed', id of the last group}
--         {'repeated', receipt}  an earlier call was carried out under the same receipt
--         {'unregistered'}
--         {'of another run'}
--         {'full'}               the queue has reached a limit
--         {'plan'}               a group needs planning: nothing was changed
--         {'unstaged'}           a staged payload has expired

local receipt, served_weights = unpack(own_keys)
local staged, first = ARGV[5], 9

local run, answer = find_receipt(receipt)
if answer then
  return {'repeated', answer}
end
local batch_size = tonumber(redis.call('HGET', trainer, 'batch_size') or 0)
if batch_size == 0 then
  return {'unregistered'}
end
if ARGV[7] ~= '' and ARGV[7] ~= redis.call('HGET', trainer, 'run_uuid') then
  return {'of another run'}
end
for i = first, #ARGV, 4 do
  local registered = ARGV[i] ~= '-' and redis.call('HGET', group_sizes, ARGV[i])
  if (registered and registered ~= ARGV[i + 1]) or batch_size % tonumber(ARGV[i + 1]) ~= 0 then
    return {'plan'}
  end
  if staged ~= '' and redis.call('STRLEN', staged .. ARGV[i + 3]) ~= tonumber(ARGV[i + 2]) then
    return {'unstaged'}
  end
end
local held = redis.call('HMGET', totals, 'queued_groups', 'queued_bytes', 'buffered_bytes')
if tonumber(held[1] or 0) >= tonumber(ARGV[3])
    or tonumber(held[2] or 0) + tonumber(held[3] or 0) >= tonumber(ARGV[4]) then
  return {'full'}
end

-- unregistered ids count as one sender, so that invented ids do not add new kinds
local function sender(env_id)
  return redis.call('HEXISTS', group_sizes, env_id) == 1 and env_id or '-'
end

local function received_under()
  if ARGV[6] ~= '' then
    return ARGV[6]
  end
  local served = redis.call('HMGET', served_weights, 'epoch', 'step')
  local version = (served[1] or '') .. '.' .. (served[2] or '')
  return string.match(version, '^%d+%.%d+$') and '@' .. version or ''
end

local under = received_under()
local now_ms = now()
local id, groups, sequences, bytes = nil, 0, 0, 0
for i = first, #ARGV, 4 do
  local env_id, size, stored = sender(ARGV[i]), ARGV[i + 1], ARGV[i + 2]
  id = redis.call('INCR', last_group_id)
  store(id, staged, ARGV[i + 3])
  local kind = env_id .. ' ' .. size
  local entry = string.format('%s %016d %d:%s:%s%s %s', kind, id, id, size, stored, under, now_ms)
  redis.call('ZADD', queue, 0, entry)
  redis.call('HINCRBY', queued_kinds, kind, 1)
  redis.call('HINCRBY', queued_sizes, size, 1)
  groups, sequences, bytes = groups + 1, sequences + tonumber(size), bytes + tonumber(stored)
end
redis.call('HINCRBY', totals, 'queued_groups', groups)
redis.call('HINCRBY', totals, 'queued_sequences', sequences)
redis.call('HINCRBY', totals, 'queued_bytes', bytes)
set_latest(id)
add_positions(ARGV[8])
redis.call('SET', receipt, run .. ' ' .. ARGV[2], 'EX', ARGV[1])
return {'placed', id}
