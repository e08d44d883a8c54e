-- Decides from which slot entries go on, and writes it for those that are new, have changed or are gone.
--
-- A new entry, and one whose schedule has another fingerprint, counts from now: its first slot is its next
-- one. What the old schedule had due and undecided is skipped. A stored slot that lies beyond the horizon was written
-- by a clock that had jumped; it is reset to now.
-- An entry that the schedule no longer has is marked as removed, and forgotten once the mark is older than the limit;
-- one that comes back with the same fingerprint goes on where it was.
-- Which fingerprint was in force when is kept too, so that the slots of a time can be computed later.
-- Where the ledger has lost data, what the leader remembers is put back first: the later of two last decided slots
-- counts, so that it never moves back. Slots that may have been sent, and nobody knows, are missed.
--
-- KEYS  1 lease
--       2 entries: hash of entry -> {slot, fingerprint, count, missed, skipped, open, removed}
--       3 definitions: hash of entry -> [{fingerprint, since, until}], in µs as texts, the latest last
--       4 counts
--       5, … for each entry its ranges of slots that were never sent
-- ARGV  1 lease value of the term
--       2 now, in µs since the Unix epoch
--       3 horizon in µs: a stored slot later than this is reset
--       4 removed entries are forgotten when marked before this (µs)
--       5 why slots are missed that may have been sent
--       6, … for each entry: its name, its fingerprint ('' if the schedule no longer has it), what is remembered of it
--         (as in `entries`, '' for nothing), and the slots that may have been sent ({first, last, count}, '' for none)
-- Returns  {0, lease value}      no longer the leader; nothing was written
--          {1, kind, slot, …}    for each entry: kept, new, changed, restored (it was removed), recalled (it was
--                                lost), reset, removed or forgotten; slot in µs

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end

local now, horizon, answer = ARGV[2], tonumber(ARGV[3]), {1}

-- Keeps the definitions of an entry whose schedule has this fingerprint from `since` on; '' for none.
local function define(name, fingerprint, since)
  local readable, known = pcall(cjson.decode, redis.call('HGET', KEYS[3], name) or '[]')
  known = readable and type(known) == 'table' and known or {}
  local latest = known[#known]
  if latest and latest.fingerprint == fingerprint then
    latest['until'] = nil
    if tonumber(latest.since) > tonumber(since) then
      latest.since = since
    end
  else
    if latest and not latest['until'] then
      latest['until'] = now
    end
    if fingerprint ~= '' then
      known[#known + 1] = {fingerprint = fingerprint, since = since}
    end
  end
  while #known > 50 do
    table.remove(known, 1)
  end
  if #known > 0 then
    redis.call('HSET', KEYS[3], name, cjson.encode(known))
  end
end

for i = 6, #ARGV, 4 do
  local name, fingerprint, unsent = ARGV[i], ARGV[i + 1], KEYS[5 + (i - 6) / 4]
  local known, remembered = entry_of(redis.call('HGET', KEYS[2], name)), entry_of(ARGV[i + 2])
  local recalled = false
  if remembered and (not known or tonumber(known.slot) < tonumber(remembered.slot)) then
    if known then
      keep_range(unsent, known.slot, {state = 'forgotten', first = whole(tonumber(known.slot) + 1), last = remembered.slot,
        count = 0, reason = 'Redis has lost its record'})
    end
    known, recalled = remembered, true
  end
  local entry = known or {slot = now, count = 0, missed = 0}
  local lost = ARGV[i + 3] ~= '' and cjson.decode(ARGV[i + 3])
  local since = entry.slot
  if lost and tonumber(entry.slot) < tonumber(lost.last) then
    recalled = true
    keep_range(unsent, entry.slot,
      {state = 'missed', first = lost.first, last = lost.last, count = lost.count, reason = ARGV[5]})
    entry.slot = lost.last
    entry.missed = (entry.missed or 0) + lost.count
    redis.call('HINCRBY', KEYS[4], 'missed', lost.count)
    event('missed', 'entry', name, 'from', lost.first, 'to', lost.last, 'count', lost.count, 'reason', ARGV[5])
  end
  local decided = entry.slot
  local kind = 'kept'
  if fingerprint == '' then
    if not entry.removed then
      kind = 'removed'
      entry.removed = now
    elseif tonumber(entry.removed) < tonumber(ARGV[4]) then
      kind = 'forgotten'
    end
  else
    if not known then
      kind = 'new'
    elseif entry.fingerprint ~= fingerprint then
      kind = 'changed'
      if tonumber(entry.slot) < tonumber(now) then
        entry.slot = now
        keep_range(unsent, decided, {state = 'skipped', first = whole(tonumber(decided) + 1), last = now, count = 0,
          reason = 'its schedule changed before it was sent'})
      end
    elseif entry.removed then
      kind = 'restored'
    end
    if tonumber(entry.slot) > horizon then
      kind = 'reset'
      entry.slot = now
      -- What was missed in the time to come will be decided about anew; what lies before stays explained.
      for _, text in ipairs(redis.call('ZRANGEBYSCORE', unsent, '(' .. now, '+inf')) do
        local readable, range = pcall(cjson.decode, text)
        redis.call('ZREM', unsent, text)
        if readable and type(range) == 'table' and (tonumber(range.first) or math.huge) <= tonumber(now) then
          range.last, range.count = now, 0
          redis.call('ZADD', unsent, now, cjson.encode(range))
        end
      end
    end
    entry.fingerprint = fingerprint
    entry.removed = nil
  end
  if kind == 'forgotten' then
    redis.call('HDEL', KEYS[2], name)
    redis.call('HDEL', KEYS[3], name)
  else
    redis.call('HSET', KEYS[2], name, cjson.encode(entry))
    define(name, fingerprint, (kind == 'kept' or kind == 'restored') and since or now)
  end
  kind = kind == 'kept' and recalled and 'recalled' or kind
  if kind ~= 'kept' then
    event('defined', 'entry', name, 'kind', kind, 'schedule', fingerprint)
  end
  answer[#answer + 1] = kind
  answer[#answer + 1] = entry.slot
end
return answer
