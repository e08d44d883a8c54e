-- Decides whether a leader leaves the lead to another replica for a while: not if nobody else could do better,
-- as no other has been seen just now, or all of those are in such a retreat themselves.
--
-- KEYS  1 retreats: holder -> when its retreat ends, by the server's clock (ms)
--       2 replicas: sorted set of holder -> when it was seen last (Unix seconds)
-- ARGV  1 holder
--       2 length of the retreat in ms
--       3 how long ago another replica may have been seen, in seconds
-- Returns  1 it may leave, and is in retreat; 0 it is to go on

local now = now_in_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now))

local since = string.format('%.6f', now_in_us() / 1000000 - tonumber(ARGV[3]))
for _, other in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], since, '+inf')) do
  if other ~= ARGV[1] and not redis.call('ZSCORE', KEYS[1], other) then
    redis.call('ZADD', KEYS[1], whole(now + tonumber(ARGV[2])), ARGV[1])
    -- The set goes with the last retreat that it may hold.
    redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[2])))
    return 1
  end
end
return 0
