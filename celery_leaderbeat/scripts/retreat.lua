-- Decides whether a leader leaves the lead to another replica for a while: not if nobody else could do better,
-- as all others are in such a retreat themselves.
--
-- KEYS  1 retreats: holder -> when its retreat ends, by the server's clock (ms)
-- ARGV  1 holder
--       2 length of the retreat in ms
--       3, … the holders of the other replicas
-- Returns  1 it may leave, and is in retreat; 0 it is to go on

local now = now_in_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now))

for i = 3, #ARGV do
  if not redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    redis.call('ZADD', KEYS[1], whole(now + tonumber(ARGV[2])), ARGV[1])
    -- The set goes with the last retreat that it may hold.
    redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[2])))
    return 1
  end
end
return 0
