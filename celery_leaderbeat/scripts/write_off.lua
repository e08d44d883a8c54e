-- Decides that slots of one entry will never be sent, and why: 'missed', or 'skipped' where that is on purpose.
--
-- The last-decided slot moves to the newest of them, never back. Slots that had been given back, or that an
-- older epoch had claimed, have records, which become final here; the others need none: the range and its
-- count say it all. Where all of them have records, they had been decided before, and the last-decided slot stays.
-- A record that is gone, or was never written since the slot was only asked for, is made good by a range.
--
-- KEYS  1 lease
--       2 entries: hash of entry -> {slot, fingerprint, count, missed, skipped, open, removed}
--       3 unfinished
--       4 counts
--       5 unsent: the entry's ranges of slots without records, by their newest slot
--       6, … records of those slots of the range that have one
-- ARGV  1 lease value of the term
--       2 epoch of the term
--       3 entry
--       4 oldest slot of the range, in µs
--       5 newest slot of the range, in µs
--       6 number of slots in the range
--       7 reason
--       8 fingerprint of the entry's schedule
--       9 'missed' or 'skipped'
--       10, … the slots of those records, in µs
-- Returns  {0, lease value}  no longer the leader
--          {1, counted}      how many slots got this end here

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end

local state = ARGV[9]
local entry = entry_of(redis.call('HGET', KEYS[2], ARGV[3])) or {count = 0, missed = 0}
local counted = 0

for i = 6, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'key', 'epoch', 'ttl')
  if record[1] == 'returned' or (record[1] == 'claimed' and (tonumber(record[3]) or 0) < tonumber(ARGV[2])) then
    redis.call('HSET', KEYS[i], 'state', state, 'reason', ARGV[7])
    redis.call('PEXPIRE', KEYS[i], record[4])
    redis.call('ZREM', KEYS[3], record[2])
    counted = counted + 1
  end
  if not record[1] or record[1] == 'returned' then
    -- Ranges outlive records.
    keep_range(KEYS[5], '', {state = state, first = ARGV[i + 4], last = ARGV[i + 4], count = 1, reason = ARGV[7]})
  end
  if not record[1] then
    counted = counted + 1
  end
end
local without = tonumber(ARGV[6]) - (#KEYS - 5)
if without > 0 and (not entry.slot or tonumber(entry.slot) < tonumber(ARGV[5])) then
  local first = ARGV[4]
  if entry.slot and tonumber(first) <= tonumber(entry.slot) then
    -- Those without records come after the last-decided slot: what lies before it has an end of its own.
    first = whole(tonumber(entry.slot) + 1)
  end
  keep_range(KEYS[5], entry.slot or '',
    {state = state, first = first, last = ARGV[5], count = without, reason = ARGV[7]})
  counted = counted + without
  entry.slot = ARGV[5]
  entry.fingerprint = ARGV[8]
end
if counted > 0 and entry.slot then
  entry[state] = (entry[state] or 0) + counted
  redis.call('HSET', KEYS[2], ARGV[3], cjson.encode(entry))
end
if counted > 0 then
  redis.call('HINCRBY', KEYS[4], state, counted)
  event(state, 'entry', ARGV[3], 'epoch', ARGV[2], 'from', ARGV[4], 'to', ARGV[5], 'count', counted,
    'reason', ARGV[7])
end
return {1, counted}
