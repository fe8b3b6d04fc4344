-- Record that a plain poll was answered in full: the next plain poll deletes the batch.
--
-- ARGV  1 batch id  2 claim of the poll whose answer sent it
-- Returns 'delivered'
--         'gone'        another poll or another trainer has the batch: cut this answer off

local batch_id, claim = ARGV[1], ARGV[2]
local delivered = claim .. ' delivered'

local found = redis.call('HGET', answers, batch_id)
if found == claim then
  -- HDEL must be the first write: with full memory Redis rejects a script whose first write may
  -- need more memory, and only delivered batches are ever deleted
  redis.call('HDEL', answers, batch_id)
  redis.call('HSET', answers, batch_id, delivered)
elseif found ~= delivered then
  return 'gone'
end
return 'delivered'
