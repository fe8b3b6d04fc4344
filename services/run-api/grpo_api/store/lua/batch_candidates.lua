-- The oldest entries of each kind, as many as one batch could hold of that kind alone.
--
-- ARGV  1 batch_size
-- Returns entries of the queue, in no particular order
--
-- Entries of one kind are interchangeable, so a plan takes only the oldest of each kind.

local batch_size = tonumber(ARGV[1])

local candidates = {}
for _, kind in ipairs(redis.call('HKEYS', queued_kinds)) do
  local sequences = tonumber(string.match(kind, '%d+$'))
  local first, last = '[' .. kind .. ' ', '[' .. kind .. ' \255'
  local most = math.floor(batch_size / sequences)
  if most > 0 then
    local oldest = redis.call('ZRANGEBYLEX', queue, first, last, 'LIMIT', 0, most)
    for _, entry in ipairs(oldest) do
      table.insert(candidates, entry)
    end
  end
end
return candidates
