-- Decides that a slot of an older epoch counts as missed: its leader claimed it and never said what became of
-- it, its entry prefers a missed slot to a second copy, and the time in which that leader could still have
-- published it is over. That time ends a while after the term of whoever asks began: from then on the older
-- leader starts no publish.
--
-- Neighbouring slots that one leader left so are told of as one range.
--
-- KEYS  1 lease
--       2 unfinished
--       3 counts
--       4, … the slots' records; neighbouring slots of an entry one after the other
-- ARGV  1 lease value of the term
--       2 epoch of the term
--       3 end of that time, in ms since the Unix epoch
--       4, … for each record its tick key, and '1' if its slot follows that of the record before it
-- Returns  {0, lease value}  no longer the leader
--          {1, answer, …}    for each record: 'unconfirmed' (just now), 'wait' (it isn't over), or
--                            the state that the record is in ('' if it is gone). Only what is claimed,
--                            returned or running stays in the unfinished set.

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end

local epoch, ends = tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_in_ms()
local looked_after = {claimed = true, returned = true, running = true, wait = true}
local reason = 'unconfirmed: its leader was gone before it confirmed the slot'
local answer, range = {1}, nil

-- Writes the event of the range that ends here, if there is one.
local function tell()
  if range then
    event('missed', 'entry', range.entry, 'epoch', range.epoch, 'from', range.first, 'to', range.last,
      'count', range.count, 'reason', reason)
    range = nil
  end
end

for i = 4, #KEYS do
  local key, follows = ARGV[2 * i - 4], ARGV[2 * i - 3] == '1'
  local record = redis.call('HMGET', KEYS[i], 'state', 'epoch', 'prefer', 'entry', 'slot', 'ttl')
  local state, just_now = record[1] or '', false
  if state == 'claimed' and (tonumber(record[2]) or 0) < epoch and record[3] ~= 'duplicate' then
    if now < ends then
      state = 'wait'
    else
      state, just_now = 'unconfirmed', true
      redis.call('HSET', KEYS[i], 'state', state, 'reason', reason)
      -- As a rule it was never sent: no later slot waits for it.
      redis.call('HDEL', KEYS[i], 'busy_until')
      redis.call('PEXPIRE', KEYS[i], record[6])
      redis.call('HINCRBY', KEYS[3], 'unconfirmed', 1)
      if not (range and follows and range.epoch == record[2]) then
        tell()
        range = {entry = record[4], epoch = record[2], first = record[5], count = 0}
      end
      range.last, range.count = record[5], range.count + 1
    end
  end
  if not just_now then
    tell()
  end
  if not looked_after[state] then
    redis.call('ZREM', KEYS[2], key)
  end
  answer[#answer + 1] = state
end
tell()
return answer
