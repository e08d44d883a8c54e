-- Keeps a request for slots until a leader has dealt with it: one slot of its own for now ('run'), or the slots of a
-- time ('backfill').
--
-- KEYS  1 requests: hash of id -> {kind, entry, since, until, force, by, at}, in µs as texts
-- ARGV  1 id
--       2 kind
--       3 entry
--       4 begin in µs, exclusive; '' for now
--       5 end in µs, inclusive; '' for now
--       6 '1' to start also slots that are done or under way
--       7 by whom
-- Returns  the server's time, in µs, in whole ms: the slot of a 'run'

local time = redis.call('TIME')
local now = time[1] .. string.format('%03d', math.floor(tonumber(time[2]) / 1000)) .. '000'
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode({kind = ARGV[2], entry = ARGV[3],
  since = ARGV[4] ~= '' and ARGV[4] or now, ['until'] = ARGV[5] ~= '' and ARGV[5] or now, force = ARGV[6] == '1',
  by = ARGV[7], at = now}))
event('requested', 'entry', ARGV[3], 'kind', ARGV[2], 'from', ARGV[4], 'to', ARGV[5], 'by', ARGV[7])
return now
