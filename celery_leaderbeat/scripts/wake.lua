-- Wakes all replicas, so that each looks whether it leads. Decides nothing.
--
-- KEYS  1 lease: names the node
-- ARGV  1 channel on which replicas wait
--       2 '1' in a cluster, whose channels may be sharded
-- Returns  1

redis.call('PUBLISH', ARGV[1], 'look')
if ARGV[2] == '1' then
  -- Older servers don't know it, and their channels are all plain.
  redis.pcall('SPUBLISH', ARGV[1], 'look')
end
return 1
