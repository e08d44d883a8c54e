-- Decides whether a term goes on: the lease is extended only while it holds this very term's value.
--
-- The epoch of the term that leads is the latest one: where the store has lost it, it is written again.
--
-- KEYS  1 lease
--       2 epoch: the latest epoch
-- ARGV  1 lease value of the term (holder and epoch are part of it)
--       2 lease TTL in ms
--       3 epoch of the term
-- Returns  {1, seconds, microseconds}   extended; the server's time
--          {0, lease value}             not ours: the value that stands there, '' for none

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if (tonumber(redis.call('GET', KEYS[2]) or '0') or 0) < tonumber(ARGV[3]) then
  redis.call('SET', KEYS[2], ARGV[3])
end
local now = redis.call('TIME')
return {1, now[1], now[2]}
