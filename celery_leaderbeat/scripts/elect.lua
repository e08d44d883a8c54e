-- Decides whether a candidate becomes the leader, and under which epoch.
--
-- The lease is taken when it is free, or when it still holds exactly the value that the candidate names: a
-- lease whose holder the candidate found to be gone (fast failover). Epoch and lease are written together.
-- An epoch is higher than the stored one, than any the candidate has seen, and not below the server's
-- clock, so that epochs go on rising when the store has lost its data.
-- While a replica of a newer release stands for election, the lease is left to it.
--
-- KEYS  1 lease: who leads (JSON), expires with the term
--       2 epoch: the latest epoch
--       3 app: the identity of the application that this prefix belongs to
--       4 released: the epoch whose leader released the lease last, and why
--       5 replicas: sorted set of holder -> when it was seen last (Unix seconds)
--       6 releases: hash of holder -> {release, rank, stands}
-- ARGV  1 holder of the candidate
--       2 lease TTL in ms
--       3 highest epoch that the candidate has seen, 0 if none
--       4 identity of the candidate's application
--       5 further attributes of the lease (a JSON object)
--       6 lease value that may be taken over, '' for none
--       7 rank of the candidate's release, '' for none
--       8 '1' if it stands against candidates of newer releases, too
-- Returns  {'elected', lease value, seconds, microseconds}   the server's time, as TIME gives it
--          {'held', lease value, remaining ms}               remaining < 0: the lease doesn't expire
--          {'left', holder, release}                         left to that candidate of a newer release
--          {'foreign', identity}                             the prefix belongs to another application

local owner = redis.call('GET', KEYS[3])
if owner and owner ~= ARGV[4] then
  return {'foreign', owner}
end

local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[6] then
  return {'held', held, redis.call('PTTL', KEYS[1])}
end

local newest = newest_candidate(KEYS[5], KEYS[6], ARGV[7])
if newest and ARGV[8] ~= '1' then
  return {'left', newest.holder, newest.release}
end

local now = redis.call('TIME')
local stored = tonumber(redis.call('GET', KEYS[2]) or '0') or 0
local epoch = math.max(stored + 1, tonumber(ARGV[3]) + 1, tonumber(now[1]))

local released, how = string.match(redis.call('GET', KEYS[4]) or '', '^(%d+) (.+)$')
local why = 'expired'
if held then
  why = 'deposed'
elseif stored == 0 then
  why = 'free'
elseif tonumber(released or '') == stored then
  why = how
end

local lease = cjson.decode(ARGV[5])
lease.holder = ARGV[1]
lease.epoch = epoch
lease.app = ARGV[4]
lease.since = now[1] .. '.' .. string.format('%06d', tonumber(now[2]))
local value = cjson.encode(lease)

redis.call('SET', KEYS[3], ARGV[4])
redis.call('SET', KEYS[2], whole(epoch))
redis.call('SET', KEYS[1], value, 'PX', ARGV[2])
if lease.release then
  event('elected', 'epoch', whole(epoch), 'holder', ARGV[1], 'why', why, 'release', lease.release)
else
  event('elected', 'epoch', whole(epoch), 'holder', ARGV[1], 'why', why)
end
return {'elected', value, now[1], now[2]}
