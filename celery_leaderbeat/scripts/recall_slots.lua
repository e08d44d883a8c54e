-- Decides which slots are recorded again as given back, after Redis has lost their records: those that the leader
-- knows to be claimed and unsent, or whose entries prefer a second copy to a missed slot.
--
-- A record that is there says more than what is remembered, and stays.
--
-- KEYS  1 lease
--       2 unfinished
--       3, … the slots' records
-- ARGV  1 lease value of the term
--       2 epoch of the term
--       3 reason
--       4, … for each record a JSON object: key, entry, slot (µs, a string), task, task_id, attempt, prefer,
--         ttl (ms), on_crash, max_attempts
-- Returns  {0, lease value}  no longer the leader; nothing was written
--          {1, slots}        for how many slots a record was written

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end

local now, recalled = whole(now_in_ms()), 0

for i = 4, #ARGV do
  local item, slot = cjson.decode(ARGV[i]), KEYS[i - 1]
  if redis.call('HLEN', slot) == 0 then
    -- First, as in a claim.
    redis.call('ZADD', KEYS[2], now, item.key)
    redis.call('HSET', slot, 'state', 'returned', 'epoch', ARGV[2], 'batch', '', 'key', item.key, 'entry', item.entry,
      'slot', item.slot, 'task', item.task, 'task_id', item.task_id, 'attempt', item.attempt, 'prefer', item.prefer,
      'ttl', whole(item.ttl), 'on_crash', item.on_crash, 'max_attempts', item.max_attempts, 'reason', ARGV[3])
    redis.call('PEXPIRE', slot, LONG)
    event('returned', 'entry', item.entry, 'key', item.key, 'epoch', ARGV[2], 'attempt', item.attempt,
      'reason', ARGV[3])
    recalled = recalled + 1
  end
end
return {1, recalled}
