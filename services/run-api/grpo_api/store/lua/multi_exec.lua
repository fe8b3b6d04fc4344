-- Run commands as one transaction with full memory: MULTI then rejects even read commands.
--
-- KEYS  none: they are part of the commands
-- ARGV  for each command: the number of its words, then the words
-- Returns the answers in the same order

local answers, at = {}, 1
while at <= #ARGV do
  local last = at + tonumber(ARGV[at])
  table.insert(answers, redis.call(unpack(ARGV, at + 1, last)))
  at = last + 1
end
return answers
