-- Counters of the run.
--
-- ARGV  1 milliseconds without a poll after which an environment counts as disconnected
-- Returns {step, batches handed out, acknowledged, redeliveries, num_steps (0: unknown),
--          queued_groups, queued_sequences, queued_bytes, buffered_parts, buffered_bytes,
--          leased_bytes, age of the oldest lease (ms), age of the oldest queued group (ms),
--          environments alive, environments registered, batches leased, groups refused,
--          groups lost, reason for the last refusal, uuid of the run or ''}: numbers, except the
--          last two

local timeout_ms = tonumber(ARGV[1])
local now_ms = tonumber(now())

local facts = {}
local function add(key, ...)
  for _, value in ipairs(redis.call('HMGET', key, ...)) do
    table.insert(facts, tonumber(value or 0))
  end
end
local leased_batches = redis.call('HLEN', leases)
add(trainer, 'step', 'last_batch')
table.insert(facts, facts[2] - leased_batches)
add(trainer, 'redeliveries', 'ends_at')
add(
  totals,
  'queued_groups', 'queued_sequences', 'queued_bytes', 'buffered_parts', 'buffered_bytes',
  'leased_bytes'
)

local oldest_lease = redis.call('HGET', leases, number(trainer, 'acknowledged') + 1)
local leased_ms = oldest_lease and string.match(oldest_lease, '^%d+ %d+ (%d+)')
table.insert(facts, leased_ms and now_ms - leased_ms or 0)

local oldest_ms = now_ms
for _, kind in ipairs(redis.call('HKEYS', queued_kinds)) do
  local first, last = '[' .. kind .. ' ', '[' .. kind .. ' \255'
  local entry = redis.call('ZRANGEBYLEX', queue, first, last, 'LIMIT', 0, 1)[1]
  if entry then
    oldest_ms = math.min(oldest_ms, tonumber(string.match(entry, '(%d+)$')))
  end
end
table.insert(facts, now_ms - oldest_ms)

local alive = 0
for _, env_id in ipairs(redis.call('SMEMBERS', connected)) do
  if now_ms - tonumber(redis.call('HGET', seen, env_id)) <= timeout_ms then
    alive = alive + 1
  end
end
table.insert(facts, alive)
table.insert(facts, number(totals, 'environments'))
table.insert(facts, leased_batches)
add(refusals, 'groups')
local lost = 0
for _, groups in ipairs(redis.call('HVALS', losses)) do
  lost = lost + tonumber(groups)
end
table.insert(facts, lost)
table.insert(facts, redis.call('HGET', refusals, 'last') or '')
table.insert(facts, redis.call('HGET', trainer, 'run_uuid') or '')
return facts
