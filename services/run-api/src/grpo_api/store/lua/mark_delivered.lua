-- Note that a trainer which cannot acknowledge was sent a whole batch: its next poll lets go of it.
--
-- KEYS  1 answers (hash)
-- ARGV  1 batch id  2 name of the answer that it was sent in
-- Returns 'delivered'
--         'gone'        it is another answer's, or another trainer's: end this one unfinished

local answers, batch_id, answer = KEYS[1], ARGV[1], ARGV[2]
local delivered = answer .. ' delivered'

local found = redis.call('HGET', answers, batch_id)
if found == answer then
  -- deleted first: where memory is full Redis refuses a script that begins with a write which may
  -- need more, and only what was delivered is ever let go of
  redis.call('HDEL', answers, batch_id)
  redis.call('HSET', answers, batch_id, delivered)
elseif found ~= delivered then
  return 'gone'
end
return 'delivered'
