-- Decides whether a run may say how it ended: only the run that holds the record.
--
-- A run that was taken for dead no longer holds a slot that was abandoned then.
-- A run that rejected its message back into the queue leaves the slot as it was before: sent and not begun, or
-- waiting for the retry that this message is.
--
-- KEYS  1 the slot's record
--       2 counts
--       3 unfinished
-- ARGV  1 run
--       2 how it ended: done, failed, retrying or requeued
--       3 reason, '' for none
--       4 ms for which a slot that waits for its retry counts as unfinished
-- Returns  {1, state}  recorded
--          {0, state}  another run holds the record, or none ('' if it is gone)

local record = redis.call('HMGET', KEYS[1], 'state', 'run', 'ttl', 'after', 'key', 'entry', 'epoch', 'attempt')
if record[2] ~= ARGV[1] or record[1] == 'abandoned' then
  return {0, record[1] or ''}
end
if record[1] == 'running' then
  local now = now_in_ms()
  local after = record[4] or ''
  if ARGV[2] ~= 'requeued' then
    redis.call('HSET', KEYS[1], 'state', ARGV[2], 'finished_at', whole(now))
    if ARGV[2] == 'retrying' then
      redis.call('HSET', KEYS[1], 'busy_until', whole(now + tonumber(ARGV[4])))
    end
  elseif after ~= '' then
    redis.call('HSET', KEYS[1], 'state', 'retrying', 'run', after)
    redis.call('HDEL', KEYS[1], 'after', 'run_until')
  else
    redis.call('HSET', KEYS[1], 'state', 'sent')
    redis.call('HDEL', KEYS[1], 'run', 'after', 'run_until')
  end
  redis.call('HDEL', KEYS[1], 'died_at', 'reason')
  if ARGV[3] ~= '' then
    redis.call('HSET', KEYS[1], 'reason', ARGV[3])
  end
  local kept = tonumber(record[3])
  redis.call('PEXPIRE', KEYS[1], whole(ARGV[2] == 'retrying' and kept + tonumber(ARGV[4]) or kept))
  redis.call('ZREM', KEYS[3], record[5])
  redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
  event(ARGV[2], 'entry', record[6], 'key', record[5], 'epoch', record[7], 'attempt', record[8], 'reason', ARGV[3])
end
return {1, ARGV[2]}
