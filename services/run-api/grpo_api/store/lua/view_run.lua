-- All registered environments and the counters of the queue, at one moment.
--
-- ARGV  1 env_id of the environment that polls, or ''
-- Returns {time (ms), {step, batch_size, ends_at}, environments, names, connected, seen, kinds,
--         sizes, {queued groups, queued bytes, buffered bytes}}: hashes as field, value, ...; of
--         sizes only the fields
--
-- The time is the clock of Redis, so the clocks of several run-api processes may differ.


local now_ms = now()
if redis.call('HEXISTS', environments, ARGV[1]) == 1 then
  -- HDEL must be the first write: with full memory Redis rejects a script whose first write may
  -- need more memory, and an environment without this time counts as disconnected
  redis.call('HDEL', seen, ARGV[1])
  redis.call('HSET', seen, ARGV[1], now_ms)
end
return {
  now_ms,
  redis.call('HMGET', trainer, 'step', 'batch_size', 'ends_at'),
  redis.call('HGETALL', environments),
  redis.call('HGETALL', environment_names),
  redis.call('SMEMBERS', connected),
  redis.call('HGETALL', seen),
  redis.call('HGETALL', queued_kinds),
  redis.call('HKEYS', queued_sizes),
  redis.call('HMGET', totals, 'queued_groups', 'queued_bytes', 'buffered_bytes'),
}
