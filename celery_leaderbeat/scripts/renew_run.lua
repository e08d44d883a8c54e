-- Decides which runs go on: the run lease is extended only for the run that holds the record.
--
-- KEYS  1 unfinished
--       2, … the slots' records
-- ARGV  1 run lease in ms
--       2, … for each record its run
-- Returns  for each record 1 (extended) or 0 (the run no longer holds it)

local ends = whole(now_in_ms() + tonumber(ARGV[1]))
local answer = {}

for i = 2, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'run', 'ttl', 'key', 'died_at')
  if record[1] == 'running' and record[2] == ARGV[i] then
    redis.call('HSET', KEYS[i], 'run_until', ends)
    if redis.call('PTTL', KEYS[i]) < tonumber(record[3]) then
      redis.call('PEXPIRE', KEYS[i], record[3])
    end
    if record[5] then
      -- It had been taken for dead.
      redis.call('HDEL', KEYS[i], 'died_at', 'reason')
      redis.call('ZADD', KEYS[1], ends, record[4])
    else
      redis.call('ZADD', KEYS[1], 'XX', ends, record[4])
    end
    answer[#answer + 1] = 1
  else
    answer[#answer + 1] = 0
  end
end
return answer
