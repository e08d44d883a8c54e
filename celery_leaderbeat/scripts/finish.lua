-- Decides whether a run may say how it ended: only the run that holds the record.
--
-- A run that rejected its message back into the queue leaves the slot as it was before: sent and not begun, or
-- waiting for the retry that this message is.
--
-- KEYS  1 the slot's record
--       2 counts
-- ARGV  1 run
--       2 how it ended: done, failed, retrying or requeued
--       3 reason, '' for none
-- Returns  {1, state}  recorded
--          {0, state}  another run holds the record, or none ('' if it is gone)

local record = redis.call('HMGET', KEYS[1], 'state', 'run', 'ttl', 'after')
if record[2] ~= ARGV[1] then
  return {0, record[1] or ''}
end
if record[1] == 'running' then
  local time = redis.call('TIME')
  local now = time[1] .. string.format('%03d', math.floor(tonumber(time[2]) / 1000))
  local after = record[4] or ''
  if ARGV[2] ~= 'requeued' then
    redis.call('HSET', KEYS[1], 'state', ARGV[2], 'finished_at', now)
  elseif after ~= '' then
    redis.call('HSET', KEYS[1], 'state', 'retrying', 'run', after)
    redis.call('HDEL', KEYS[1], 'after', 'run_until')
  else
    redis.call('HSET', KEYS[1], 'state', 'sent')
    redis.call('HDEL', KEYS[1], 'run', 'after', 'run_until')
  end
  if ARGV[3] ~= '' then
    redis.call('HSET', KEYS[1], 'reason', ARGV[3])
  end
  redis.call('PEXPIRE', KEYS[1], record[3])
  redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
end
return {1, ARGV[2]}
