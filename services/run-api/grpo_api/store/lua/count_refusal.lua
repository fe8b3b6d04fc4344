-- Count groups that run-api refused, and store the reason. Without a trainer there is no run to count
-- for.
--
-- KEYS  of this call: the receipt
-- ARGV  1 seconds to keep the receipt  2 groups  3 reason
-- Returns nothing
--
-- With the receipt, a repeated refusal counts once for each trainer.

local receipt = own_keys[1]
local receipt_s, groups, reason = unpack(ARGV)

local trainer_id = redis.call('HGET', trainer, 'id')
local run, counted_for = find_receipt(receipt)
if not trainer_id or counted_for == trainer_id then
  return
end
redis.call('HINCRBY', refusals, 'groups', groups)
redis.call('HSET', refusals, 'last', reason)
redis.call('SET', receipt, run .. ' ' .. trainer_id, 'EX', receipt_s)
