-- Decides which pauses that the leader remembers are put back, after Redis has lost them.
--
-- A pause never becomes longer: of two states of the same one, known by its begin, the earlier end counts. So what was
-- resumed or paused meanwhile stays as it was ordered.
--
-- KEYS  1 lease
--       2 paused: hash of entry ('' for all) -> [{since, until, note, by}], in µs as texts
-- ARGV  1 lease value of the term
--       2, … entry, its pauses as JSON, entry, …
-- Returns  {0, lease value}  no longer the leader; nothing was written
--          {1, entries}      for how many entries something was put back

local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then
  return {0, held or ''}
end

local recalled = 0

for i = 2, #ARGV, 2 do
  local spans, changed = pauses_of(redis.call('HGET', KEYS[2], ARGV[i])), false
  for _, remembered in ipairs(pauses_of(ARGV[i + 1])) do
    local stored, ends = nil, remembered['until']
    for _, span in ipairs(spans) do
      stored = stored or (span.since == remembered.since and span)
    end
    if not stored then
      spans[#spans + 1] = remembered
      changed = true
    elseif ends and (not stored['until'] or tonumber(stored['until']) > tonumber(ends)) then
      stored['until'] = ends
      changed = true
    end
  end
  if changed then
    table.sort(spans, function(one, other) return tonumber(one.since) < tonumber(other.since) end)
    redis.call('HSET', KEYS[2], ARGV[i], cjson.encode(spans))
    event('pause_recalled', 'entry', ARGV[i])
    recalled = recalled + 1
  end
end
return {1, recalled}
