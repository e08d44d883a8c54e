-- Decides that a pause ends now. What came due meanwhile stays skipped, unless a request asks for it.
--
-- KEYS  1 paused: hash of entry ('' for all) -> [{since, until, note, by}], in µs as texts
--       2 requests: hash of id -> request
-- ARGV  1 entry, '' for all
--       2 by whom
--       3 id of the request that catches up, '' for none
-- Returns  how many pauses ended

local now = whole(now_in_us())
local spans = pauses_of(redis.call('HGET', KEYS[1], ARGV[1]))
local ended, since = 0, nil

for _, span in ipairs(spans) do
  if not span['until'] or tonumber(span['until']) > tonumber(now) then
    span['until'] = now
    ended = ended + 1
    since = since or span.since
  end
end
-- A pause that gave way to a later one ended where that one began: together they are one.
for i = #spans, 1, -1 do
  if spans[i]['until'] == since then
    since = spans[i].since
  end
end
if ended > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(spans))
  event('resumed', 'entry', ARGV[1], 'by', ARGV[2])
  if ARGV[3] ~= '' then
    redis.call('HSET', KEYS[2], ARGV[3], cjson.encode({kind = 'catch_up', entry = ARGV[1], since = since,
      ['until'] = now, force = false, by = ARGV[2], at = now}))
    event('requested', 'entry', ARGV[1], 'kind', 'catch_up', 'by', ARGV[2])
  end
end
return ended
