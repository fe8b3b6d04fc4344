-- Append a piece to a staged payload, which is stored before it is queued.
--
-- KEYS  of this call: a staged payload (string)
-- ARGV  1 bytes before this piece  2 piece  3 seconds until it expires unless queued
-- Returns {'staged'}
--         {'unstaged'}   the earlier pieces have expired
--
-- Repeating a call whose answer was lost adds nothing.

local key, at, piece, keep_s = own_keys[1], tonumber(ARGV[1]), ARGV[2], ARGV[3]

local length = redis.call('STRLEN', key)
if length < at then
  return {'unstaged'}
end
if length == at then
  redis.call('APPEND', key, piece)
  redis.call('EXPIRE', key, keep_s)
end
return {'staged'}
