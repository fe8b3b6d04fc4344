-- Everyone who registered, and the queue in numbers, at one moment.
--
-- KEYS  1 trainer (hash)    2 environments (hash)  3 environment_names (hash)  4 connected (set)
--       5 seen (hash)       6 queued_kinds (hash)  7 queued_sizes (hash)       8 totals (hash)
-- ARGV  1 env_id that is polling, or ''
-- Returns {time (ms), {step, batch_size, ends_at}, environments, names, connected, seen, kinds,
--         sizes, {queued groups, queued bytes, buffered bytes}}: hashes as field, value, ..., of
--         sizes the fields only
--
-- The time is Redis' own: replicas of run-api need not agree on theirs.

local trainer, environments, names, connected, seen, kinds, sizes, totals = unpack(KEYS)

local now_ms = now()
if redis.call('HEXISTS', environments, ARGV[1]) == 1 then
  -- deleted first: where memory is full Redis refuses a script that begins with a write which may
  -- need more, and whoever is not seen counts as gone
  redis.call('HDEL', seen, ARGV[1])
  redis.call('HSET', seen, ARGV[1], now_ms)
end
return {
  now_ms,
  redis.call('HMGET', trainer, 'step', 'batch_size', 'ends_at'),
  redis.call('HGETALL', environments),
  redis.call('HGETALL', names),
  redis.call('SMEMBERS', connected),
  redis.call('HGETALL', seen),
  redis.call('HGETALL', kinds),
  redis.call('HKEYS', sizes),
  redis.call('HMGET', totals, 'queued_groups', 'queued_bytes', 'buffered_bytes'),
}
