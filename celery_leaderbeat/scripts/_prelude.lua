-- Goes before every script: the events, the clock, and what more than one script has to read.
--
-- Each call brings one key and one argument ahead of those that a script's own header counts; they are taken
-- off here.
--
-- KEYS  first: events, a stream of what was decided, capped
-- ARGV  first: how many events are kept, 0 for none

local EVENTS, EVENTS_KEPT = table.remove(KEYS, 1), table.remove(ARGV, 1)
-- How long the records of slots that somebody has to look after are kept, and ranges, in ms: 400 days. It is as long as
-- nobody may lead without a slot being lost. The ends of slots set the time that their claims brought.
local LONG = '34560000000'

-- Writes an event: its name, then field, value, field, value, … The stream's own ids are its times.
local function event(name, ...)
  if EVENTS_KEPT ~= '0' then
    -- What is in the way of events must not be in the way of the decision.
    redis.pcall('XADD', EVENTS, 'MAXLEN', '~', EVENTS_KEPT, '*', 'event', name, ...)
  end
end

-- The server's time in µs since the Unix epoch.
local function now_in_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- The server's time in ms since the Unix epoch.
local function now_in_ms()
  return math.floor(now_in_us() / 1000)
end

-- Wakes whoever waits on a channel. In a cluster ('1') the channel may be sharded.
local function wake(channel, in_cluster, word)
  redis.call('PUBLISH', channel, word)
  if in_cluster == '1' then
    -- Older servers don't know it, and their channels are all plain.
    redis.pcall('SPUBLISH', channel, word)
  end
end

-- A whole number as text; Lua would write a large one with an exponent.
local function whole(number)
  return string.format('%d', number)
end

-- Whether a release is newer than another, by their ranks. Those of different kinds have no order; any is newer
-- than none.
local function is_newer(rank, than)
  return rank ~= '' and (than == '' or (string.sub(rank, 1, 1) == string.sub(than, 1, 1) and rank > than))
end

-- The candidate of the newest release, if that is newer than this rank: {holder, release, rank}, else nil. A replica
-- that wasn't seen in the last three seconds is no candidate, whatever it said.
local function newest_candidate(replicas, releases, rank)
  local newest = nil
  local noted = redis.call('HGETALL', releases)
  for i = 1, #noted, 2 do
    local readable, found = pcall(cjson.decode, noted[i + 1])
    if readable and type(found) == 'table' and found.stands == true then
      local seen = tonumber(redis.call('ZSCORE', replicas, noted[i]) or '') or 0
      local theirs = tostring(found.rank or '')
      if is_newer(theirs, newest and newest.rank or rank) and now_in_us() / 1000000 - seen < 3 then
        newest = {holder = noted[i], release = tostring(found.release or ''), rank = theirs}
      end
    end
  end
  return newest
end

-- What is kept of an entry, nil where there is nothing that can be read.
local function entry_of(text)
  local readable, entry = pcall(cjson.decode, text or '')
  if readable and type(entry) == 'table' and tonumber(entry.slot) then
    return entry
  end
  return nil
end

-- The pauses in one field of the `paused` hash; what can't be read is none.
local function pauses_of(text)
  local readable, spans = pcall(cjson.decode, text or '[]')
  local found = {}
  for _, span in ipairs(readable and type(spans) == 'table' and spans or {}) do
    if type(span) == 'table' and tonumber(span.since) then
      span['until'] = tonumber(span['until']) and span['until'] or nil
      found[#found + 1] = span
    end
  end
  return found
end

-- Keeps a range of one entry's slots that will never be sent. One that goes on right where the newest range ended,
-- in the same state and for the same reason, becomes part of it. `before` is the slot decided before the range.
--
-- range  {state, first, last, count, reason}; slots in µs, as texts
local function keep_range(key, before, range)
  local newest = redis.call('ZREVRANGE', key, 0, 0)[1]
  local readable, known = pcall(cjson.decode, newest or '')
  known = readable and type(known) == 'table' and known or {}
  if known.last == before and known.state == range.state and known.reason == range.reason then
    redis.call('ZREM', key, newest)
    range.first = known.first
    -- 0 where nobody counted them.
    range.count = known.count > 0 and range.count > 0 and known.count + range.count or 0
  end
  redis.call('ZADD', key, range.last, cjson.encode(range))
  redis.call('ZREMRANGEBYRANK', key, 0, -10001)
  redis.call('PEXPIRE', key, LONG)
end
