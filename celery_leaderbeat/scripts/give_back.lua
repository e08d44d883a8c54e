-- Decides whether a claim is given back: a slot that its own leader knows to be unsent can be claimed again.
--
-- Acts by the record's epoch and batch, also after that leader has lost its lease.
--
-- KEYS  1 unfinished
--       2, … the slots' records
-- ARGV  1 epoch of the claims
--       2 batch of the claims
--       3 reason
-- Returns  for each record: 'returned', or the state that it stays in, or 'superseded'

local now = whole(now_in_ms())
local answer = {}

for i = 2, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'epoch', 'key', 'ttl', 'batch', 'entry', 'attempt')
  local state = record[1]
  if not state or record[2] ~= ARGV[1] or record[5] ~= ARGV[2] then
    state = 'superseded'
  elseif state == 'claimed' or state == 'unconfirmed' then
    redis.call('HSET', KEYS[i], 'state', 'returned', 'reason', ARGV[3])
    redis.call('PEXPIRE', KEYS[i], LONG)
    redis.call('ZADD', KEYS[1], now, record[3])
    event('returned', 'entry', record[6], 'key', record[3], 'epoch', ARGV[1], 'attempt', record[7] or 1,
      'reason', ARGV[3])
    state = 'returned'
  end
  answer[#answer + 1] = state
end
return answer
