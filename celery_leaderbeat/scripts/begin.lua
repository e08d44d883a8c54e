-- Decides whether a worker may run the message that it holds, and records the run.
--
-- A slot starts once at a time and never again after it has ended. What belongs to the run that holds the
-- record goes on: its retry (the message names that run), and the redelivery of its message once the run's
-- lease is over, which means that its worker died. Until then it is put off: should the run reject its message into the
-- queue, the broker has no other. Where the entry says on_crash 'skip' or 'rerun' the redelivery of what died doesn't
-- run: nobody runs the slot again, or the leader does, as its next attempt. Until the leader has decided that, it is put
-- off too: a run that was only frozen, or cut off, still says how it ended.
-- A message that never saw the answer to its question asks again: the run that it had asked for never began.
-- An older epoch's message runs where the newer epoch that claimed the slot gave it back, missed or skipped it: it is
-- the only copy.
-- The modes 'current' and 'observed' are asked when a slot starts, not again for the runs that follow.
--
-- KEYS  1 the slot's record
--       2 epoch: the latest epoch
--       3 observed: hash of task -> newest epoch that this task has seen
--       4 counts
--       5 unfinished: sorted set of tick keys that a leader has to look after, by time in ms
-- ARGV  1 run: identity of this run, new for each call of the body
--       2 epoch of the message
--       3 attempt of the message
--       4 after: the run whose retry this message is, '' for the message that the leader sent
--       5 fencing mode: slot, current or observed
--       6 '1' if the broker may have delivered this message before, to a worker that didn't acknowledge it
--       7 run lease in ms
--       8 ttl of a record that isn't there yet, in ms
--       9 worker
--      10 tick key
--      11 entry
--      12 slot in µs
--      13 task
--      14 task id
--      15 asked: the runs under which this message asked before without seeing the answer, between spaces
-- Returns  {'run', what the record was before}   its state, '' if there was none
--          {'refuse', reason, epoch of the record}
--          {'put_off', ms until the lease of the run that holds the record is over, or as long as one}

local run, epoch, attempt, after = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local mode, redelivered = ARGV[5], ARGV[6] == '1'
local now = now_in_ms()
local record = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'attempt', 'run', 'after', 'run_until', 'ttl', 'on_crash')
local state, holder, holder_after = record[1], record[4], record[5] or ''
local begun = holder and true or false

local function refuse(reason)
  redis.call('HINCRBY', KEYS[4], 'refused', 1)
  event('refused', 'entry', ARGV[11], 'key', ARGV[10], 'epoch', ARGV[2], 'attempt', ARGV[3], 'reason', reason)
  return {'refuse', reason, record[2] or ''}
end

if state then
  if epoch < (tonumber(record[2]) or 0) and state ~= 'returned' and state ~= 'missed' and state ~= 'skipped' then
    return refuse('a newer epoch claimed the slot')
  elseif attempt < (tonumber(record[3]) or 1) then
    return refuse('a newer attempt of the slot was sent')
  elseif state == 'refused' then
    return refuse('the slot was refused before')
  end
end

local asked = begun and state == 'running' and (holder == run or string.find(ARGV[15], ' ' .. holder .. ' ', 1, true) ~= nil)
if begun and not asked and not (after ~= '' and after == holder) then
  if after ~= holder_after then
    return refuse('the run that this message belongs to no longer holds the slot')
  elseif state == 'running' then
    local left = (tonumber(record[6]) or 0) - now
    if not redelivered then
      return refuse(left > 0 and 'the slot is running elsewhere' or 'the slot was begun by a worker that died')
    elseif left > 0 then
      return {'put_off', left}
    elseif record[8] == 'skip' or record[8] == 'rerun' then
      -- As long as the copy waits for the leader, the leader has to know of the slot.
      redis.call('ZADD', KEYS[5], 'NX', whole(now), ARGV[10])
      return {'put_off', tonumber(ARGV[7])}
    end
  elseif state == 'retrying' then
    return refuse('the slot waits for its retry')
  else
    return refuse('the slot is ' .. state)
  end
end

if not begun then
  local reason
  if mode == 'current' then
    local leads = tonumber(redis.call('GET', KEYS[2]) or '0') or 0
    if epoch < leads then
      reason = 'epoch ' .. whole(leads) .. ' leads now'
    end
  elseif mode == 'observed' then
    local seen = tonumber(redis.call('HGET', KEYS[3], ARGV[13]) or '0') or 0
    if epoch < seen then
      reason = 'the task has seen epoch ' .. whole(seen)
    elseif epoch > seen then
      redis.call('HSET', KEYS[3], ARGV[13], ARGV[2])
    end
  end
  if reason then
    if state then
      redis.call('HSET', KEYS[1], 'state', 'refused', 'reason', reason)
    end
    return refuse(reason)
  end
end

local ttl = math.max(tonumber(record[7]) or tonumber(ARGV[8]), 2 * tonumber(ARGV[7]))
redis.call('HSET', KEYS[1], 'state', 'running', 'run', run, 'after', after, 'epoch', ARGV[2],
  'attempt', ARGV[3], 'worker', ARGV[9], 'key', ARGV[10], 'entry', ARGV[11], 'slot', ARGV[12],
  'task', ARGV[13], 'task_id', ARGV[14], 'started_at', whole(now),
  'run_until', whole(now + tonumber(ARGV[7])), 'ttl', whole(ttl))
redis.call('HDEL', KEYS[1], 'reason', 'finished_at', 'died_at', 'waits')
redis.call('PEXPIRE', KEYS[1], LONG)
redis.call('ZADD', KEYS[5], whole(now + tonumber(ARGV[7])), ARGV[10])
if not begun then
  redis.call('HINCRBY', KEYS[4], 'started', 1)
end
event('started', 'entry', ARGV[11], 'key', ARGV[10], 'epoch', ARGV[2], 'attempt', ARGV[3], 'worker', ARGV[9])
return {'run', state or ''}
