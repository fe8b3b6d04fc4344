-- Delete an environment that leaves, and its buffered parts.
--
-- ARGV  1 env_id
-- Returns nil if no such environment ever registered, else the number of dropped parts

local ids = redis.call('GET', last_env_id) or 0
if tonumber(ARGV[1]) >= tonumber(ids) then
  return nil
end
return forget_environment(ARGV[1])
