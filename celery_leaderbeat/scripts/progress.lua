-- Decides from where a request is still to be carried out: forward, never back, and only while it is kept.
--
-- KEYS  1 requests: hash of id -> {kind, entry, since, until, force, by, at}, in µs as texts
-- ARGV  1 id
--       2 the latest slot that is dealt with, as are all before it, in µs
-- Returns  1 if it has moved

local readable, request = pcall(cjson.decode, redis.call('HGET', KEYS[1], ARGV[1]) or '')
if readable and type(request) == 'table' and (tonumber(request.since) or 0) < tonumber(ARGV[2]) then
  request.since = ARGV[2]
  redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(request))
  return 1
end
return 0
