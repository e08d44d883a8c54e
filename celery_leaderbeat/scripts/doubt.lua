-- Decides that a slot of an older epoch counts as missed: its leader claimed it and never said what became of
-- it, its entry prefers a missed slot to a second copy, and the time in which that leader could still have
-- published it is over. That time ends a while after the term of whoever asks began: from then on the older
-- leader starts no publish.
--
-- KEYS  1 lease
--       2 unfinished
--       3 counts
--       4, … the slots' records
-- ARGV  1 lease value of the term
--       2 epoch of the term
--       3 end of that time, in ms since the Unix epoch
--       4, … for each record its tick key
-- Returns  {0, lease value}  no longer the leader
--          {1, answer, …}    for each record: 'unconfirmed' (just now), 'wait' (it isn't over), or
--                            the state that the record is in ('' if it is gone). Only what is claimed or
--                            returned stays in the unfinished set.

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end

local epoch, ends = tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local answer = {1}

for i = 4, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'epoch', 'prefer')
  local state = record[1] or ''
  if state == 'claimed' and (tonumber(record[2]) or 0) < epoch and record[3] ~= 'duplicate' then
    if now < ends then
      state = 'wait'
    else
      state = 'unconfirmed'
      redis.call('HSET', KEYS[i], 'state', state, 'reason', 'its leader was gone before it confirmed the slot')
      redis.call('HINCRBY', KEYS[3], 'unconfirmed', 1)
    end
  end
  if state ~= 'claimed' and state ~= 'returned' and state ~= 'wait' then
    redis.call('ZREM', KEYS[2], ARGV[i])
  end
  answer[#answer + 1] = state
end
return answer
