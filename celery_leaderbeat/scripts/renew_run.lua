-- Decides which runs go on: the run lease is extended only for the run that holds the record.
--
-- KEYS  1, … the slots' records
-- ARGV  1 run lease in ms
--       2, … for each record its run
-- Returns  for each record 1 (extended) or 0 (the run no longer holds it)

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local answer = {}

for i = 1, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'run', 'ttl')
  if record[1] == 'running' and record[2] == ARGV[i + 1] then
    redis.call('HSET', KEYS[i], 'run_until', string.format('%d', now + tonumber(ARGV[1])))
    redis.call('PEXPIRE', KEYS[i], record[3])
    answer[i] = 1
  else
    answer[i] = 0
  end
end
return answer
