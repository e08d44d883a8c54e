-- Decides what a claim becomes by what its leader knows of the broker: 'sent' when the broker took the
-- message, 'unconfirmed' when it may or may not have taken it.
--
-- Acts by the record's epoch and batch, not by the lease: a leader that has lost its lease still knows this.
-- A slot that a worker has begun keeps its state. One that was given back while its publish was in doubt is sent
-- after all when the broker took it; 'unconfirmed' leaves it given back.
--
-- KEYS  1 unfinished
--       2 counts
--       3, … the slots' records
-- ARGV  1 epoch of the claims
--       2 batch of the claims
--       3, … for each record: 'sent' or 'unconfirmed'
-- Returns  for each record: the state that it is in now, or 'superseded' if another claim holds it

local now = whole(now_in_ms())
local answer = {}

for i = 3, #KEYS do
  local outcome = ARGV[i]
  local record = redis.call('HMGET', KEYS[i], 'state', 'epoch', 'key', 'batch', 'sent_at', 'entry', 'attempt', 'slot',
    'ttl')
  local state = record[1]
  if not state or record[2] ~= ARGV[1] or record[4] ~= ARGV[2] then
    answer[#answer + 1] = 'superseded'
  else
    if outcome == 'sent' then
      if not record[5] then
        redis.call('HSET', KEYS[i], 'sent_at', now)
        redis.call('HINCRBY', KEYS[2], 'sent', 1)
        event('sent', 'entry', record[6], 'key', record[3], 'epoch', ARGV[1], 'attempt', record[7] or 1)
      end
      if state == 'claimed' or state == 'unconfirmed' or state == 'returned' then
        redis.call('HSET', KEYS[i], 'state', 'sent')
        redis.call('HDEL', KEYS[i], 'reason', 'waits')
        state = 'sent'
      end
    elseif state == 'claimed' then
      local reason = 'unconfirmed: the outcome of the publish is unknown'
      redis.call('HSET', KEYS[i], 'state', 'unconfirmed', 'reason', reason)
      redis.call('HINCRBY', KEYS[2], 'unconfirmed', 1)
      event('missed', 'entry', record[6], 'epoch', ARGV[1], 'from', record[8], 'to', record[8], 'count', 1,
        'reason', reason)
      state = 'unconfirmed'
    end
    if state ~= 'running' and state ~= 'returned' then
      redis.call('ZREM', KEYS[1], record[3])
      if state == 'sent' or state == 'unconfirmed' then
        redis.call('PEXPIRE', KEYS[i], record[9])
      end
    end
    answer[#answer + 1] = state
  end
end
return answer
