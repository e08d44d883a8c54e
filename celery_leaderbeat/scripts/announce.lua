-- Decides who counts as alive: notes a replica, and whether it stands for election as one of its release, and
-- forgets those that weren't seen for a while.
--
-- Whoever begins to stand wakes the others: a leader of an older release hands over to it.
-- Another application's replica isn't noted.
--
-- KEYS  1 replicas: sorted set of holder -> when it was seen last (Unix seconds)
--       2 releases: hash of holder -> {release, rank, stands}
--       3 app: the identity of the application that this prefix belongs to
-- ARGV  1 holder
--       2 how long a replica counts as alive after it was seen, in seconds
--       3 identity of its application
--       4 its release, '' for none
--       5 rank of its release, '' for none
--       6 '1' if it stands for election
--       7 channel on which replicas wait
--       8 '1' in a cluster, whose channels may be sharded
-- Returns  {'foreign'}                        nothing was written
--          {holder, release, holder, …}       the candidate of the newest release, if newer than this one's, or '' and
--                                             ''; then all that count as alive

local owner = redis.call('GET', KEYS[3])
if owner and owner ~= ARGV[3] then
  return {'foreign'}
end

local now = now_in_us() / 1000000
redis.call('ZADD', KEYS[1], string.format('%.6f', now), ARGV[1])
local since = string.format('%.6f', now - tonumber(ARGV[2]))
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. since)) do
  redis.call('ZREM', KEYS[1], holder)
  redis.call('HDEL', KEYS[2], holder)
end

if ARGV[5] ~= '' then
  local stands = ARGV[6] == '1'
  local noted = cjson.encode({release = ARGV[4], rank = ARGV[5], stands = stands})
  if redis.call('HGET', KEYS[2], ARGV[1]) ~= noted then
    redis.call('HSET', KEYS[2], ARGV[1], noted)
    if stands then
      wake(ARGV[7], ARGV[8], 'stands')
    end
  end
end

local newest = newest_candidate(KEYS[1], KEYS[2], ARGV[5])
local answer = {newest and newest.holder or '', newest and newest.release or ''}
for _, holder in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  answer[#answer + 1] = holder
end
return answer
