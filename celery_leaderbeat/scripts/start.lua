-- Decides whether a job outside Celery may run for a slot now, and records the run.
--
-- No leader takes part: such a record has epoch 0, and stays out of the set of what leaders look after.
-- A slot starts once at a time and never again after it has ended. Where the lease of its run is over, the
-- process counts as dead: the next attempt goes to whoever asks, up to as many as the first start of the slot
-- allowed; then the slot is abandoned.
-- The same run asking again (the answer had been lost) gets the same answer, and its lease from now on.
-- What a leader claimed, and what the entry of this name has left behind, is the leader's to decide.
--
-- KEYS  1 the slot's record
--       2 entries: hash of entry -> {slot, …}
--       3 counts
-- ARGV  1 run: identity of this run, new for each call
--       2 on_crash, as who asks wants it: skip (at most one attempt) or rerun
--       3 max_attempts, 1 with skip
--       4 run lease in ms
--       5 ttl of the record, in ms
--       6 worker
--       7 tick key
--       8 entry: the job's name
--       9 slot in µs
-- Returns  {verdict, ms, field, value, …}: and the record as it is now, nothing where there is none
--          'run'        the run may begin
--          'wait'       another run holds the slot, for so many ms unless it renews its lease
--          'abandoned'  its process has died and it won't be run again, as decided just now
--          'ended'      it has ended, or was abandoned before
--          'foreign'    it is a leader's

local run, on_crash, name = ARGV[1], ARGV[2], ARGV[8]
local now = now_in_ms()
local record = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'attempt', 'run', 'run_until', 'max_attempts',
  'worker')
local state, attempt = record[1], tonumber(record[3]) or 1

local function answer(verdict, left)
  local fields = redis.call('HGETALL', KEYS[1])
  table.insert(fields, 1, verdict)
  table.insert(fields, 2, left or 0)
  return fields
end

local function told(what, reason)
  event(what, 'entry', name, 'key', ARGV[7], 'epoch', '0', 'attempt', whole(attempt), 'reason', reason)
end

if not state then
  local entry = entry_of(redis.call('HGET', KEYS[2], name))
  if entry and tonumber(entry.slot) >= tonumber(ARGV[9]) then
    return answer('foreign')
  end
  redis.call('HSET', KEYS[1], 'epoch', '0', 'on_crash', on_crash, 'max_attempts', ARGV[3], 'key', ARGV[7],
    'entry', name, 'slot', ARGV[9], 'ttl', ARGV[5])
  redis.call('HINCRBY', KEYS[3], 'started', 1)
elseif record[2] ~= '0' then
  return answer('foreign')
elseif state ~= 'running' then
  return answer('ended')
elseif record[4] == run then
  redis.call('HSET', KEYS[1], 'run_until', whole(now + tonumber(ARGV[4])))
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
  return answer('run')
else
  local left = (tonumber(record[5]) or 0) - now
  local allowed = tonumber(record[6]) or 1
  if left > 0 then
    return answer('wait', left)
  elseif attempt < allowed and on_crash ~= 'rerun' then
    -- Whoever asks for one attempt at most doesn't make the second one.
    return answer('wait')
  end
  local died = 'its run on ' .. (record[7] or '?') .. ' died'
  told('died', died)
  if attempt >= allowed then
    local reason = died .. ', as attempt ' .. whole(attempt) .. ' of ' .. whole(allowed)
    redis.call('HSET', KEYS[1], 'state', 'abandoned', 'reason', reason, 'finished_at', whole(now))
    redis.call('HDEL', KEYS[1], 'run', 'run_until')
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
    redis.call('HINCRBY', KEYS[3], 'abandoned', 1)
    told('abandoned', reason)
    return answer('abandoned')
  end
  attempt = attempt + 1
  redis.call('HINCRBY', KEYS[3], 'rerun', 1)
  told('rerun', died)
end

redis.call('HSET', KEYS[1], 'state', 'running', 'run', run, 'attempt', whole(attempt), 'worker', ARGV[6],
  'started_at', whole(now), 'run_until', whole(now + tonumber(ARGV[4])))
redis.call('PEXPIRE', KEYS[1], ARGV[5])
event('started', 'entry', name, 'key', ARGV[7], 'epoch', '0', 'attempt', whole(attempt), 'worker', ARGV[6])
return answer('run')
