-- Tell what this Redis had at its start, and keep how many groups it has lost.
--
-- ARGV  1 id of the run-api process  2 groups that it has found to be lost and not stored yet
-- Returns {id of the Redis process, last group id at its start}; {'', 0} if Redis rejects INFO
--
-- Every run-api process compares with the state before anybody used this Redis, so the first one of
-- them notes it.

local info = redis.pcall('INFO', 'server')
local process = type(info) == 'string' and string.match(info, 'run_id:(%x+)')
if not process then
  return {'', 0}
end
-- HDEL must be the first write: with full memory Redis rejects a script whose first write may need
-- more memory, and run-api could not even acknowledge batches
if redis.call('HGET', start, 'process') ~= process then
  redis.call('HDEL', start, 'process')
  redis.call('HSET', start, 'process', process, 'last_group_id', redis.call('GET', last_group_id) or 0)
end
if ARGV[2] ~= '0' then
  redis.call('HDEL', losses, '-')
  redis.call('HSET', losses, ARGV[1] .. process, ARGV[2])
end
return {process, number(start, 'last_group_id')}
