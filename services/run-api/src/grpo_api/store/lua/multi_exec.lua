-- Carry out commands at one moment where memory is full: there MULTI refuses even those that read.
--
-- KEYS  none: the commands name theirs
-- ARGV  for each command: how many words, the words
-- Returns the answers in this order

local answers, at = {}, 1
while at <= #ARGV do
  local last = at + tonumber(ARGV[at])
  table.insert(answers, redis.call(unpack(ARGV, at + 1, last)))
  at = last + 1
end
return answers
