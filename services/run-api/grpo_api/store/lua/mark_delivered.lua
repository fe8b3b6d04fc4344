-- Record that a plain poll was answered in full: the next plain poll deletes the batch.
--
-- KEYS  1 answers (hash: claims)
-- ARGV  1 batch id  2 claim of the poll whose answer sent it
-- Returns 'delivered'
--         'gone'        another poll or another trainer has the batch: cut this answer off

local claims, batch_id, claim = KEYS[1], ARGV[1], ARGV[2]
local delivered = claim .. ' delivered'

local found = redis.call('HGET', claims, batch_id)
if found == claim then
  -- HDEL must be the first write: with full memory Redis rejects a script whose first write may
  -- need more memory, and only delivered batches are ever deleted
  redis.call('HDEL', claims, batch_id)
  redis.call('HSET', claims, batch_id, delivered)
elseif found ~= delivered then
  return 'gone'
end
return 'delivered'
