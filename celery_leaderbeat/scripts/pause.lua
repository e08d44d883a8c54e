-- Decides from when an entry is paused: from now on. A pause that is in force already ends and gives way to this one.
--
-- KEYS  1 paused: hash of entry ('' for all) -> [{since, until, note, by}], in µs as texts
-- ARGV  1 entry, '' for all
--       2 end in µs, '' for none
--       3 note
--       4 by whom
-- Returns  the begin, in µs

local now = whole(now_in_us())
local kept = {}

for _, span in ipairs(pauses_of(redis.call('HGET', KEYS[1], ARGV[1]))) do
  if not span['until'] or tonumber(span['until']) > tonumber(now) then
    -- One that began later than now, before the clock was set back, is kept all the same: what isn't there counts as
    -- lost, and would be put back without its end.
    span['until'] = tonumber(span.since) > tonumber(now) and span.since or now
  end
  -- What ended a month ago explains no slot that is still to be decided.
  if tonumber(span['until']) > tonumber(now) - 2592000000000 and span.since ~= now then
    kept[#kept + 1] = span
  end
end
local pause = {since = now, note = ARGV[3], by = ARGV[4]}
if ARGV[2] ~= '' then
  pause['until'] = ARGV[2]
end
kept[#kept + 1] = pause
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(kept))
event('paused', 'entry', ARGV[1], 'until', ARGV[2], 'by', ARGV[4], 'reason', ARGV[3])
return now
