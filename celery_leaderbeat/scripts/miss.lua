-- Decides that slots of one entry will never be sent, and why.
--
-- The last-decided slot moves to the newest of them, never back. Slots that had been given back, or that an
-- older epoch had claimed, have records, which become final here; the others need none: the range and its
-- count say it all.
--
-- KEYS  1 lease
--       2 entries: hash of entry -> {slot, fingerprint, count, missed, miss, removed}; miss is the latest range
--       3 unfinished
--       4 counts
--       5, … records of those slots of the range that have one
-- ARGV  1 lease value of the term
--       2 epoch of the term
--       3 entry
--       4 oldest slot of the range, in µs
--       5 newest slot of the range, in µs
--       6 number of slots in the range
--       7 reason
--       8 fingerprint of the entry's schedule
-- Returns  {0, lease value}  no longer the leader
--          {1, counted}      how many slots became missed here

local function entry_of(text)
  local readable, entry = pcall(cjson.decode, text or '')
  if readable and type(entry) == 'table' and tonumber(entry.slot) then
    return entry
  end
  return nil
end

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end

local stored = redis.call('HGET', KEYS[2], ARGV[3])
local entry = entry_of(stored) or {count = 0, missed = 0}
local missed = 0

for i = 5, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'key', 'epoch')
  if record[1] == 'returned' or (record[1] == 'claimed' and (tonumber(record[3]) or 0) < tonumber(ARGV[2])) then
    redis.call('HSET', KEYS[i], 'state', 'missed', 'reason', ARGV[7])
    redis.call('ZREM', KEYS[3], record[2])
    missed = missed + 1
  end
end
if not entry.slot or tonumber(entry.slot) < tonumber(ARGV[5]) then
  missed = missed + tonumber(ARGV[6]) - (#KEYS - 4)
  entry.slot = ARGV[5]
  entry.fingerprint = ARGV[8]
end
if missed > 0 then
  entry.missed = (entry.missed or 0) + missed
  entry.miss = {first = ARGV[4], last = ARGV[5], count = tonumber(ARGV[6]), reason = ARGV[7]}
  redis.call('HSET', KEYS[2], ARGV[3], cjson.encode(entry))
  redis.call('HINCRBY', KEYS[4], 'missed', missed)
end
return {1, missed}
