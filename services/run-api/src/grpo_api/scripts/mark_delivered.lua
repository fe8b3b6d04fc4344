-- Note that a trainer which cannot acknowledge was sent a whole batch: its next poll lets go of it.
--
-- KEYS  1 trainer (hash)
-- ARGV  1 trainer id  2 batch id

local trainer, trainer_id, batch_id = KEYS[1], ARGV[1], tonumber(ARGV[2])
local delivered = tonumber(redis.call('HGET', trainer, 'delivered') or 0)
if redis.call('HGET', trainer, 'id') == trainer_id and batch_id > delivered then
  -- deleted first: where memory is full Redis refuses a script that begins with a write which may
  -- need more, and only what was delivered is ever let go of
  redis.call('HDEL', trainer, 'delivered')
  redis.call('HSET', trainer, 'delivered', batch_id)
end
