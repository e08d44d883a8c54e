-- Decides from which slot entries go on, and writes it for those that are new, have changed or are gone.
--
-- A new entry, and one whose schedule has another fingerprint, counts from now: its first slot is its next
-- one. A stored slot that lies beyond the horizon was written by a clock that had jumped; it is reset to now.
-- An entry that the schedule no longer has is marked as removed, and forgotten once the mark is older than
-- the limit; one that comes back with the same fingerprint goes on where it was.
--
-- KEYS  1 lease
--       2 entries: hash of entry -> {slot, fingerprint, count, missed, removed}
-- ARGV  1 lease value of the term
--       2 now, in µs since the Unix epoch
--       3 horizon in µs: a stored slot later than this is reset
--       4 removed entries are forgotten when marked before this (µs)
--       5, 6, … entry, fingerprint ('' if the schedule no longer has the entry), entry, fingerprint, …
-- Returns  {0, lease value}      no longer the leader; nothing was written
--          {1, kind, slot, …}    for each entry: kept, new, changed, reset, removed or forgotten; slot in µs

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

local now, horizon, answer = ARGV[2], tonumber(ARGV[3]), {1}

for i = 5, #ARGV, 2 do
  local name, fingerprint = ARGV[i], ARGV[i + 1]
  local text = redis.call('HGET', KEYS[2], name)
  local known = entry_of(text)
  local entry = known or {slot = now, count = 0, missed = 0}
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
      end
    end
    if tonumber(entry.slot) > horizon then
      kind = 'reset'
      entry.slot = now
    end
    entry.fingerprint = fingerprint
    entry.removed = nil
  end
  if kind == 'forgotten' then
    redis.call('HDEL', KEYS[2], name)
  else
    redis.call('HSET', KEYS[2], name, cjson.encode(entry))
  end
  answer[#answer + 1] = kind
  answer[#answer + 1] = entry.slot
end
return answer
