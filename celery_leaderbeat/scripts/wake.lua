-- Wakes all replicas, so that each looks whether it leads. Decides nothing.
--
-- KEYS  1 lease: names the node
-- ARGV  1 channel on which replicas wait
--       2 '1' in a cluster, whose channels may be sharded
-- Returns  1

wake(ARGV[1], ARGV[2], 'look')
return 1
