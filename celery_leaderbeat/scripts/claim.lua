-- Decides which slots this term may send, before anything is published.
--
-- A slot is claimed once. It can be claimed again only when its holder gave it back, or, if its entry
-- prefers a duplicate, when an older epoch claimed it and never confirmed it; never once a worker has begun.
-- A slot that somebody asked for by a request can be claimed under a higher attempt when it has ended without being
-- done, or, by force, whatever it is. An attempt that has been superseded can't be claimed.
-- Nothing of a paused entry is claimed but what was asked for.
-- Of an entry with an overlap policy, nothing is claimed while an earlier slot is unfinished: it is skipped, or one
-- slot waits (it is recorded as given back). Later attempts, requests and paced slots ask again.
-- The same batch asking again (the answer had been lost) gets the same answer, but for a slot that was skipped.
-- The last-decided slot of the entry moves forward with the claim, also where it shows that the slot was decided
-- before, and never back.
--
-- KEYS  1 lease
--       2 entries: hash of entry -> {slot, fingerprint, count, missed, skipped, open, removed}; open are the tick keys
--         of slots that may be unfinished, where the entry has an overlap policy
--       3 unfinished: sorted set of tick keys that somebody has to look after, by time in ms
--       4 counts: hash of totals
--       5 paused: hash of entry ('' for all) -> [{since, until, note, by}], in µs
--       6, … the slots' records, one for each item; then what the items point to
-- ARGV  1 lease value of the term
--       2 epoch of the term
--       3 identity of this batch
--       4, … for each record a JSON object: key, entry, slot (µs, a string), fingerprint, task, task_id, attempt,
--         prefer, ttl (ms), on_crash, max_attempts, overlap, request ('' for none), force; and, with an overlap policy,
--         paced (it stays undecided instead of being skipped or waiting), unstarted (ms for which it counts as
--         unfinished before it has begun), unsent (the place in KEYS of the entry's ranges) and earlier (the places in
--         KEYS of the records that the entry's `open` names)
-- Returns  {0, lease value}  no longer the leader; nothing was claimed
--          {1, answer, …}    for each record: 'claimed', or why not: 'decided' (an earlier decision without
--                            a record), 'held' (another claim stands), 'paused' or 'busy' (ask again), 'waiting' (given
--                            back until the earlier slot has ended), 'overlapped' (skipped), or the record's state

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end

local epoch, batch = tonumber(ARGV[2]), ARGV[3]
local now_us = now_in_us()
local now = math.floor(now_us / 1000)
local answer, claimed, overlapped = {1}, 0, 0
local any_pause = redis.call('HLEN', KEYS[5]) > 0
-- Ends from which a request may start a slot again.
local repeatable = {missed = true, skipped = true, failed = true, refused = true, abandoned = true, unconfirmed = true}

local function is_paused(name)
  for _, field in ipairs({name, ''}) do
    for _, span in ipairs(pauses_of(redis.call('HGET', KEYS[5], field))) do
      -- One without an end is in force, even if the clock was set back before its begin.
      if not span['until'] or (tonumber(span.since) <= now_us and tonumber(span['until']) > now_us) then
        return true
      end
    end
  end
  return false
end

-- Looks at another slot: whether it is unfinished, whether it waits for one that is, and whether it is the earlier one.
local function look_at(place, slot)
  local record = redis.call('HMGET', KEYS[place], 'key', 'state', 'busy_until', 'run_until', 'on_crash', 'attempt', 'waits',
    'slot')
  local state, counts = record[2], now < (tonumber(record[3]) or 0)
  local earlier = (tonumber(record[8]) or 0) < tonumber(slot)
  local busy = false
  if state == 'claimed' or state == 'sent' or state == 'unconfirmed' or state == 'retrying' then
    busy = counts
  elseif state == 'running' then
    busy = record[5] == 'rerun' or now < (tonumber(record[4]) or 0)
  elseif state == 'returned' then
    -- Of two that are owed the older one goes first: else each would wait for the other.
    busy = counts and (tonumber(record[6]) or 1) > 1 and earlier
  end
  return record[1] or nil, busy, state == 'returned' and record[7] == '1', earlier
end

for i = 4, #ARGV do
  local item, slot = cjson.decode(ARGV[i]), KEYS[i + 2]
  local record = redis.call('HMGET', slot, 'state', 'epoch', 'batch', 'prefer', 'attempt', 'request', 'waits',
    'max_attempts', 'ttl')
  local state, owner, attempt = record[1], tonumber(record[2] or '0') or 0, tonumber(record[5] or '1') or 1
  local entry = entry_of(redis.call('HGET', KEYS[2], item.entry))
  local before = entry and entry.slot or ''
  local ahead = item.request == '' and (not entry or tonumber(entry.slot) < tonumber(item.slot))

  -- An answer of 'claimed' is a yes.
  local stands = state == 'claimed' and 'held' or state
  local verdict
  if not state then
    verdict = (ahead or item.request ~= '') and 'claimed' or 'decided'
  elseif state == 'claimed' and owner == epoch and record[3] == batch then
    -- Written again, so that who waits for replicas waits for those that have the claim.
    redis.call('PEXPIRE', slot, LONG)
    verdict = 'repeated'
  elseif item.attempt < attempt then
    verdict = stands
  elseif state == 'returned' then
    verdict = 'claimed'
  elseif state == 'claimed' and owner < epoch and record[4] == 'duplicate' then
    verdict = 'claimed'
  elseif item.request ~= '' and item.request ~= record[6] and item.attempt > attempt
    and (item.force or repeatable[state]) then
    verdict = 'claimed'
  else
    verdict = stands
  end

  if verdict == 'claimed' and any_pause and item.request == '' and is_paused(item.entry) then
    verdict = 'paused'
  end

  local open, reason = nil, nil
  if verdict == 'claimed' and item.overlap ~= 'allow' then
    open = {}
    local unfinished, waiting
    local looked_at = {[slot] = true}
    local keys_begin = string.sub(slot, 1, #slot - #item.key)
    for _, place in ipairs(item.earlier) do
      local key, busy, waits, earlier = look_at(place, item.slot)
      looked_at[KEYS[place]] = true
      if key and key ~= item.key and (busy or waits) then
        open[#open + 1] = key
        unfinished = unfinished or (busy and key)
        -- What a leader claimed that is gone goes first, since it may have been sent: the others wait for it.
        waiting = waiting or (waits and earlier and state ~= 'claimed' and key)
      end
    end
    if item.request ~= '' and state and state ~= 'returned' and state ~= 'claimed' then
      -- By force, but not beside its own run.
      local _, busy = look_at(i + 2, item.slot)
      unfinished = unfinished or (busy and item.key)
    end
    -- What whoever asks didn't know of stays for the next one to look at.
    for _, key in ipairs(entry and type(entry.open) == 'table' and entry.open or {}) do
      if not looked_at[keys_begin .. key] and #open < 50 then
        open[#open + 1] = key
      end
    end
    if (unfinished or waiting) and (item.paced or item.attempt > 1 or item.request ~= '') then
      if unfinished then
        verdict = 'busy'
      end
    elseif unfinished and (item.overlap == 'skip' or waiting) then
      verdict = 'overlapped'
      reason = 'overlap: ' .. (waiting and waiting .. ' waits already' or unfinished .. ' is unfinished')
    elseif unfinished then
      verdict = 'waiting'
    elseif waiting then
      verdict = 'busy'
    end
  end

  if verdict == 'waiting' and record[7] == '1' then
    open[#open + 1] = item.key
  elseif verdict == 'claimed' or verdict == 'waiting' then
    local claims = verdict == 'claimed'
    -- Attempts count from the one that somebody asked for; a slot that is claimed again goes on counting.
    local goes_on = state == 'returned' or state == 'claimed'
    local asked = item.request ~= '' and item.attempt - 1 or 0
    local most = goes_on and item.request ~= '' and tonumber(record[8]) or asked + item.max_attempts
    local ttl = math.max(item.ttl, tonumber(record[9]) or 0)
    -- First, so that a slot whose record isn't written to its end (a command is refused) is looked after.
    redis.call('ZADD', KEYS[3], whole(now), item.key)
    redis.call('HSET', slot, 'state', claims and 'claimed' or 'returned', 'epoch', ARGV[2], 'batch', batch,
      'key', item.key, 'entry', item.entry, 'slot', item.slot, 'task', item.task, 'task_id', item.task_id,
      'attempt', item.attempt, 'prefer', item.prefer, 'ttl', whole(ttl), 'on_crash', item.on_crash,
      'max_attempts', whole(most), 'claimed_at', whole(now))
    redis.call('HDEL', slot, 'reason', 'sent_at', 'waits', 'run', 'after', 'run_until', 'worker', 'started_at',
      'finished_at', 'died_at', 'busy_until')
    if item.request ~= '' then
      redis.call('HSET', slot, 'request', item.request)
    end
    redis.call('PEXPIRE', slot, LONG)
    if claims then
      claimed = claimed + 1
      event('claimed', 'entry', item.entry, 'key', item.key, 'epoch', ARGV[2], 'attempt', item.attempt,
        'request', item.request)
    else
      redis.call('HSET', slot, 'waits', '1', 'reason', 'it waits for an earlier slot of its entry')
      event('returned', 'entry', item.entry, 'key', item.key, 'epoch', ARGV[2], 'attempt', item.attempt,
        'reason', 'it waits for an earlier slot of its entry')
    end
    if open then
      redis.call('HSET', slot, 'busy_until', whole(now + item.unstarted))
      open[#open + 1] = item.key
    end
  elseif verdict == 'overlapped' then
    overlapped = overlapped + 1
    if state then
      redis.call('HSET', slot, 'state', 'skipped', 'reason', reason)
      redis.call('ZREM', KEYS[3], item.key)
    else
      keep_range(KEYS[item.unsent], before,
        {state = 'skipped', first = item.slot, last = item.slot, count = 1, reason = reason})
    end
    event('skipped', 'entry', item.entry, 'epoch', ARGV[2], 'from', item.slot, 'to', item.slot, 'count', 1,
      'reason', reason)
  end

  if verdict == 'claimed' or verdict == 'waiting' or verdict == 'overlapped' then
    if ahead then
      entry = entry or {missed = 0}
      entry.slot = item.slot
      entry.fingerprint = item.fingerprint
      if verdict == 'overlapped' then
        entry.skipped = (entry.skipped or 0) + 1
      else
        entry.count = (entry.count or 0) + 1
      end
    end
    if entry and (ahead or open) then
      entry.open = open and #open > 0 and open or nil
      redis.call('HSET', KEYS[2], item.entry, cjson.encode(entry))
    end
  elseif ahead and state and verdict ~= 'paused' and verdict ~= 'busy' and verdict ~= 'repeated' then
    -- Decided before a clock was set back. Whoever leads next mustn't take it for one that was left out.
    entry = entry or {count = 0, missed = 0}
    entry.slot = item.slot
    entry.fingerprint = item.fingerprint
    redis.call('HSET', KEYS[2], item.entry, cjson.encode(entry))
  end
  answer[#answer + 1] = verdict == 'repeated' and 'claimed' or verdict
end

if claimed > 0 then
  redis.call('HINCRBY', KEYS[4], 'claimed', claimed)
end
if overlapped > 0 then
  redis.call('HINCRBY', KEYS[4], 'skipped', overlapped)
end
return answer
