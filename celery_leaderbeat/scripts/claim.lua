-- Decides which slots this term may send, before anything is published.
--
-- A slot is claimed once. It can be claimed again only when its holder gave it back, or, if its entry
-- prefers a duplicate, when an older epoch claimed it and never confirmed it; never once a worker has begun.
-- The same batch asking again (the answer had been lost) gets the same answer.
-- The last-decided slot of the entry moves forward with the claim, and never back.
--
-- KEYS  1 lease
--       2 entries: hash of entry -> {slot, fingerprint, count, missed, removed}
--       3 unfinished: sorted set of tick keys that somebody has to look after, by time in ms
--       4 counts: hash of totals
--       5, … the slots' records
-- ARGV  1 lease value of the term
--       2 epoch of the term
--       3 identity of this batch
--       4, … for each record a JSON object: key, entry, slot (µs, a string), fingerprint, task, task_id,
--         attempt, prefer, ttl (ms)
-- Returns  {0, lease value}  no longer the leader; nothing was claimed
--          {1, answer, …}    for each record: 'claimed', or why not: 'decided' (an earlier decision without
--                            a record), 'held' (another claim stands), or the record's state

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

local epoch, batch = tonumber(ARGV[2]), ARGV[3]
local time = redis.call('TIME')
local now = time[1] .. string.format('%03d', math.floor(tonumber(time[2]) / 1000))
local answer, claimed = {1}, 0

for i = 5, #KEYS do
  local item = cjson.decode(ARGV[i - 1])
  local record = redis.call('HMGET', KEYS[i], 'state', 'epoch', 'batch', 'prefer')
  local state, owner = record[1], tonumber(record[2] or '0') or 0
  local stored = redis.call('HGET', KEYS[2], item.entry)
  local entry = entry_of(stored)
  local ahead = not entry or tonumber(entry.slot) < tonumber(item.slot)

  local verdict
  if not state then
    verdict = ahead and 'claimed' or 'decided'
  elseif state == 'returned' then
    verdict = 'claimed'
  elseif state == 'claimed' and owner == epoch and record[3] == batch then
    verdict = 'repeated'
  elseif state == 'claimed' and owner < epoch and record[4] == 'duplicate' then
    verdict = 'claimed'
  else
    verdict = state == 'claimed' and 'held' or state
  end

  if verdict == 'claimed' then
    redis.call('HSET', KEYS[i], 'state', 'claimed', 'epoch', ARGV[2], 'batch', batch, 'key', item.key,
      'entry', item.entry, 'slot', item.slot, 'task', item.task, 'task_id', item.task_id,
      'attempt', item.attempt, 'prefer', item.prefer, 'ttl', item.ttl, 'claimed_at', now)
    redis.call('HDEL', KEYS[i], 'reason', 'sent_at')
    redis.call('PEXPIRE', KEYS[i], item.ttl)
    redis.call('ZADD', KEYS[3], now, item.key)
    claimed = claimed + 1
    if ahead then
      entry = entry or {missed = 0}
      entry.slot = item.slot
      entry.fingerprint = item.fingerprint
      entry.count = (entry.count or 0) + 1
      redis.call('HSET', KEYS[2], item.entry, cjson.encode(entry))
    end
  end
  answer[#answer + 1] = verdict == 'repeated' and 'claimed' or verdict
end

if claimed > 0 then
  redis.call('HINCRBY', KEYS[4], 'claimed', claimed)
end
return answer
