-- The last queued group.
--
-- KEYS  1 latest (hash)  2 payloads (hash)
-- Returns its payload, or nil before any group was queued.

local id = redis.call('HGET', KEYS[1], 'id')
return id and redis.call('HGET', KEYS[2], id)
