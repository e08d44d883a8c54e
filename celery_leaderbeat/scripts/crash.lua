-- Decides what becomes of a run whose lease is over, which means that its worker died, froze or was cut off.
--
-- on_crash 'rerun': the slot is to be sent again as its next attempt, or is abandoned after the last one.
-- on_crash 'skip': it is abandoned.
-- 'auto': it stays as it is, since the broker may deliver the message again; the death is noted once.
--
-- KEYS  1 lease
--       2 unfinished
--       3 counts
--       4, … the slots' records
-- ARGV  1 lease value of the term
--       2 ms for which a slot that is to be sent again counts as unfinished
--       3, … for each record its tick key
-- Returns  {0, lease value}  no longer the leader
--          {1, answer, …}    for each record: 'returned' or 'abandoned' (just now), 'died' (noted just now), or the
--                            state that it is in, 'running' where its lease goes on or its death was noted before,
--                            '' if it is gone

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end

local now = now_in_ms()
local answer = {1}

local function note(name, i, record, attempt, reason)
  event(name, 'entry', record[6], 'key', ARGV[i - 1], 'epoch', record[7], 'attempt', attempt, 'reason', reason)
end

for i = 4, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'run_until', 'on_crash', 'attempt', 'max_attempts', 'entry',
    'epoch', 'worker', 'ttl', 'died_at')
  local state = record[1] or ''
  local ends, attempt = tonumber(record[2]) or 0, tonumber(record[4]) or 1
  if state ~= 'running' then
    if state ~= 'claimed' and state ~= 'returned' then
      redis.call('ZREM', KEYS[2], ARGV[i - 1])
    end
  elseif now < ends then
    redis.call('ZADD', KEYS[2], whole(ends), ARGV[i - 1])
  elseif record[10] then
    state = 'died'
    redis.call('ZREM', KEYS[2], ARGV[i - 1])
  else
    local died = 'its run on ' .. (record[8] or '?') .. ' died'
    note('died', i, record, attempt, died)
    redis.call('HINCRBY', KEYS[3], 'died', 1)
    if record[3] == 'rerun' and attempt < (tonumber(record[5]) or 1) then
      state = 'returned'
      redis.call('HSET', KEYS[i], 'state', state, 'attempt', whole(attempt + 1), 'reason', died,
        'busy_until', whole(now + tonumber(ARGV[2])))
      -- Without its batch, nothing that is still said of the earlier attempt's message touches the slot.
      redis.call('HDEL', KEYS[i], 'batch', 'run', 'after', 'run_until', 'worker', 'started_at', 'died_at')
      redis.call('ZADD', KEYS[2], whole(now), ARGV[i - 1])
      redis.call('HINCRBY', KEYS[3], 'rerun', 1)
      note('rerun', i, record, attempt + 1, died)
    elseif record[3] == 'rerun' or record[3] == 'skip' then
      state = 'abandoned'
      local reason = died .. (record[3] == 'skip' and ', and on_crash is skip' or ', as attempt '
        .. whole(attempt) .. ' of ' .. (record[5] or '1'))
      redis.call('HSET', KEYS[i], 'state', state, 'reason', reason, 'finished_at', whole(now))
      redis.call('ZREM', KEYS[2], ARGV[i - 1])
      redis.call('HINCRBY', KEYS[3], state, 1)
      note(state, i, record, attempt, reason)
    else
      state = 'died'
      redis.call('HSET', KEYS[i], 'died_at', whole(now), 'reason', died)
      redis.call('ZREM', KEYS[2], ARGV[i - 1])
    end
    redis.call('PEXPIRE', KEYS[i], state == 'returned' and LONG or record[9])
  end
  answer[#answer + 1] = state
end
return answer
