-- Record that a plain poll was answered in full: the next plain poll deletes the batch.
--
-- KEYS  1 answers (hash)
-- ARGV  1 batch id  2 name of the answer that sent it
-- Returns 'delivered'
--         'gone'        another answer or another trainer has the batch: cut this answer off

local answers, batch_id, answer = KEYS[1], ARGV[1], ARGV[2]
local delivered = answer .. ' delivered'

local found = redis.call('HGET', answers, batch_id)
if found == answer then
  -- HDEL must be the first write: with full memory Redis rejects a script whose first write may
  -- need more memory, and only delivered batches are ever deleted
  redis.call('HDEL', answers, batch_id)
  redis.call('HSET', answers, batch_id, delivered)
elseif found ~= delivered then
  return 'gone'
end
return 'delivered'
