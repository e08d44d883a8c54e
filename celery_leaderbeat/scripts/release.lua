-- Decides whether a term ends here: the lease is deleted only while it holds this very term's value, and
-- the standbys are woken in the same step.
--
-- KEYS  1 lease
--       2 released: the epoch whose leader released the lease last, and why, as the next election says it
-- ARGV  1 lease value of the term
--       2 channel on which standbys wait
--       3 epoch of the term
--       4 reason
--       5 '1' in a cluster, whose channels may be sharded
--       6 '1' if it is left to a newer release
-- Returns  'released', 'held' (the lease is another term's) or 'gone' (nobody holds it)

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return held and 'held' or 'gone'
end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], ARGV[3] .. (ARGV[6] == '1' and ' released for a newer release' or ' released'))
wake(ARGV[2], ARGV[5], 'released')
event('released', 'epoch', ARGV[3], 'reason', ARGV[4])
return 'released'
