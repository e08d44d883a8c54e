"""The guards of the scripts: how each is removed, and under which rules the explorer finds out."""

from __future__ import annotations

from dataclasses import dataclass

from tests.protocol.world import Rules

__all__ = ["GUARDS", "Guard"]

_ELECTIONS = Rules(prefer="missed", elections=3, faults=0)
_MISSED = Rules(prefer="missed", elections=2, faults=1)
_DUPLICATE = Rules(prefer="duplicate", elections=2, faults=1)
_WORKERS = Rules(prefer="missed", elections=1, faults=2)
_DUPLICATE_WORKERS = Rules(prefer="duplicate", elections=1, faults=2)
_EARLY_ACKS = Rules(prefer="missed", acks_late=False, elections=1, faults=1)
_TWO_SLOTS = Rules(prefer="missed", slots=2, workers=1, elections=1, faults=1)
_MISSES = Rules(prefer="missed", misses=True, elections=2, faults=1)
_MISSES_OF_TWO = Rules(prefer="missed", slots=2, workers=1, misses=True, elections=1, faults=2)
_CURRENT = Rules(prefer="missed", mode="current", elections=2, faults=1)
_OBSERVED = Rules(prefer="missed", slots=2, workers=1, mode="observed", elections=2, faults=0)
_RERUN = Rules(prefer="missed", on_crash="rerun", max_attempts=2, elections=1, faults=1)
_RERUN_BY_THE_NEXT = Rules(prefer="missed", on_crash="rerun", max_attempts=2, elections=2, faults=1)
_RERUN_TWICE = Rules(prefer="missed", on_crash="rerun", max_attempts=2, elections=1, faults=2)
_SKIP = Rules(prefer="missed", on_crash="skip", elections=1, faults=1)
_SKIP_FROZEN = Rules(prefer="missed", on_crash="skip", elections=1, faults=3)


@dataclass(frozen=True)
class Guard:
    """A guard, how it is removed, and under which rules the explorer finds out (None: it doesn't go there)."""

    script: str
    name: str
    text: str
    instead: str
    rules: Rules | None


GUARDS = [
    Guard("elect", "a lease that is held", "if held and held ~= ARGV[6] then", "if false then", _MISSED),
    Guard(
        "elect",
        "takeover compare",
        "if held and held ~= ARGV[6] then",
        "if held and ARGV[6] == '' then",
        _ELECTIONS,
    ),
    Guard("elect", "epoch floor: stored", "math.max(stored + 1, ", "math.max(", _MISSED),
    Guard("elect", "epoch floor: highest seen", "tonumber(ARGV[3]) + 1, ", "", None),
    Guard("elect", "epoch floor: server time", ", tonumber(now[1]))", ")", None),
    Guard(
        "elect",
        "why: the latest release",
        "elseif tonumber(released or '') == stored then",
        "elseif released then",
        None,
    ),
    Guard("elect", "foreign app", "if owner and owner ~= ARGV[4] then", "if false then", None),
    Guard("elect", "newer release", "if newest and ARGV[8] ~= '1' then", "if false then", None),
    Guard(
        "elect",
        "newer release: in the end somebody leads",
        "if newest and ARGV[8] ~= '1' then",
        "if newest then",
        None,
    ),
    Guard("elect", "newer release: newer", "rank > than))", "true))", None),
    Guard(
        "elect", "newer release: comparable", "string.sub(rank, 1, 1) == string.sub(than, 1, 1)", "true", None
    ),
    Guard("elect", "newer release: stands", " and found.stands == true then", " then", None),
    Guard("elect", "newer release: lives", " and now_in_us() / 1000000 - seen < 3 then", " then", None),
    Guard(
        "retreat",
        "somebody who could do better",
        " and not redis.call('ZSCORE', KEYS[1], other) then",
        " then",
        None,
    ),
    Guard("retreat", "somebody else", "other ~= ARGV[1] and ", "", None),
    Guard("retreat", "somebody who lives", "KEYS[2], since, '+inf'", "KEYS[2], '-inf', '+inf'", None),
    Guard("retreat", "retreats end", "redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now))", "", None),
    Guard(
        "retreat",
        "the longest keeps the set",
        "math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[2]))",
        "ARGV[2]",
        None,
    ),
    Guard("announce", "foreign app", "if owner and owner ~= ARGV[3] then", "if false then", None),
    Guard(
        "announce",
        "wakes once",
        "if redis.call('HGET', KEYS[2], ARGV[1]) ~= noted then",
        "if true then",
        None,
    ),
    Guard("announce", "forgets the dead", "redis.call('ZREM', KEYS[1], holder)", "", None),
    Guard("announce", "forgets their releases", "redis.call('HDEL', KEYS[2], holder)", "", None),
    Guard("renew", "lease compare", "if held ~= ARGV[1] then", "if not held then", _MISSED),
    Guard("renew", "the epoch is lost", "redis.call('SET', KEYS[2], ARGV[3])", "", None),
    Guard("renew", "the epoch goes up", " or 0) < tonumber(ARGV[3]) then", " or 0) then", None),
    Guard(
        "release",
        "lease compare",
        "if held ~= ARGV[1] then",
        "if not held then",
        _MISSED,
    ),
    Guard("register", "lease check", "if held ~= ARGV[1] then", "if false then", None),
    Guard(
        "register",
        "the later one is put back",
        "if remembered and (not known or tonumber(known.slot) < tonumber(remembered.slot)) then",
        "if remembered then",
        None,
    ),
    Guard(
        "register",
        "what fell behind is put back",
        "(not known or tonumber(known.slot) < tonumber(remembered.slot))",
        "not known",
        None,
    ),
    Guard(
        "register",
        "what is gone is put back",
        "if remembered and (not known or",
        "if remembered and (known and",
        None,
    ),
    Guard(
        "register",
        "what may have been sent",
        "if lost and tonumber(entry.slot) < tonumber(lost.last) then",
        "if false then",
        None,
    ),
    Guard(
        "register",
        "what may have been sent, once",
        "if lost and tonumber(entry.slot) < tonumber(lost.last) then",
        "if lost then",
        None,
    ),
    Guard("recall_slots", "lease check", "if held ~= ARGV[1] then", "if false then", None),
    Guard("recall_slots", "what is there", "if redis.call('HLEN', slot) == 0 then", "if true then", None),
    Guard("recall_slots", "sweep list", "redis.call('ZADD', KEYS[2], now, item.key)", "", None),
    Guard(
        "recall_slots",
        "kept",
        "redis.call('PEXPIRE', slot, LONG)",
        "redis.call('PEXPIRE', slot, item.ttl)",
        None,
    ),
    Guard("recall_pauses", "lease check", "if held ~= ARGV[1] then", "if false then", None),
    Guard("recall_pauses", "the same pause", "(span.since == remembered.since and span)", "false", None),
    Guard(
        "recall_pauses",
        "never longer",
        "elseif ends and (not stored['until'] or tonumber(stored['until']) > tonumber(ends)) then",
        "elseif stored['until'] ~= ends then",
        None,
    ),
    Guard(
        "register",
        "last decided",
        "if tonumber(entry.slot) < tonumber(now) then",
        "if true then",
        None,
    ),
    Guard("register", "removed: defined all the time", "    latest['until'] = nil\n", "", None),
    Guard("claim", "lease check", "if held ~= ARGV[1] then", "if false then", _MISSED),
    Guard("claim", "batch identity", "owner == epoch and record[3] == batch", "owner == epoch", _MISSED),
    Guard(
        "claim",
        "a write for who waits for replicas",
        "    redis.call('PEXPIRE', slot, LONG)\n    verdict = 'repeated'",
        "    verdict = 'repeated'",
        None,
    ),
    Guard(
        "claim", "batch of the own epoch", "owner == epoch and record[3] == batch", "record[3] == batch", None
    ),
    Guard(
        "claim",
        "returned alone",
        "elseif state == 'returned' then\n    verdict",
        "elseif state ~= 'claimed' then\n    verdict",
        _MISSED,
    ),
    Guard(
        "claim",
        "returned at all",
        "elseif state == 'returned' then\n    verdict",
        "elseif false then\n    verdict",
        _MISSED,
    ),
    Guard(
        "claim",
        "older epoch",
        "owner < epoch and record[4] == 'duplicate'",
        "record[4] == 'duplicate'",
        _DUPLICATE_WORKERS,
    ),
    Guard(
        "claim", "prefers a duplicate", "owner < epoch and record[4] == 'duplicate'", "owner < epoch", _MISSED
    ),
    Guard(
        "claim",
        "decided without a record",
        "(ahead or item.request ~= '') and 'claimed' or 'decided'",
        "'claimed'",
        _MISSES,
    ),
    Guard("claim", "last decided", "    if ahead then", "    ahead = true\n    if ahead then", _TWO_SLOTS),
    Guard("claim", "attempt", "elseif item.attempt < attempt then", "elseif false then", _RERUN),
    Guard(
        "claim",
        "a yes is a yes",
        "local stands = state == 'claimed' and 'held' or state",
        "local stands = state",
        _MISSED,
    ),
    Guard("claim", "paused", "if verdict == 'claimed' and any_pause and", "if false and", None),
    Guard("claim", "paused: all", "ipairs({name, ''})", "ipairs({name})", None),
    Guard("claim", "paused: its own", "ipairs({name, ''})", "ipairs({''})", None),
    Guard("claim", "paused: begun", "tonumber(span.since) <= now_us and ", "", None),
    Guard(
        "claim",
        "paused: not ended",
        " and tonumber(span['until']) > now_us)",
        ")",
        None,
    ),
    Guard(
        "claim",
        "paused: not what was asked for",
        "any_pause and item.request == '' and",
        "any_pause and",
        None,
    ),
    Guard("claim", "overlap", "verdict == 'claimed' and item.overlap ~= 'allow'", "false", None),
    Guard("claim", "overlap: under way", "    busy = counts\n", "    busy = false\n", None),
    Guard(
        "claim",
        "overlap: for its time",
        "state, counts = record[2], now < (tonumber(record[3]) or 0)",
        "state, counts = record[2], true",
        None,
    ),
    Guard("claim", "overlap: to be run again", "busy = record[5] == 'rerun' or now", "busy = now", None),
    Guard("claim", "overlap: live run", "now < (tonumber(record[4]) or 0)", "true", None),
    Guard(
        "claim",
        "overlap: unsent and owed",
        "busy = counts and (tonumber(record[6]) or 1) > 1",
        "busy = false",
        None,
    ),
    Guard(
        "claim",
        "overlap: not what was given back",
        "busy = counts and (tonumber(record[6]) or 1) > 1",
        "busy = counts",
        None,
    ),
    Guard("claim", "overlap: owed to the older one first", "> 1 and earlier", "> 1", None),
    Guard(
        "claim",
        "overlap: what may have been sent first",
        " and state ~= 'claimed' and key)",
        " and key)",
        None,
    ),
    Guard("claim", "overlap: not itself", "key and key ~= item.key and", "key and", None),
    Guard("claim", "queue: one waits", "(item.overlap == 'skip' or waiting)", "item.overlap == 'skip'", None),
    Guard("claim", "queue: its turn", "    elseif waiting then\n", "    elseif false then\n", None),
    Guard(
        "claim",
        "queue: it keeps its place",
        "record[7] == '1' then\n    open[#open + 1] = item.key\n",
        "record[7] == '1' then\n",
        None,
    ),
    Guard(
        "claim",
        "queue: told once",
        "if verdict == 'waiting' and record[7] == '1' then",
        "if false then",
        None,
    ),
    Guard(
        "claim",
        "what is owed asks again",
        "if (unfinished or waiting) and (item.paced or item.attempt > 1 or item.request ~= '') then",
        "if (unfinished or waiting) and item.paced then",
        None,
    ),
    Guard("claim", "a backlog is paced", "item.paced or item.attempt > 1", "item.attempt > 1", None),
    Guard(
        "claim",
        "request: attempt",
        "item.request ~= record[6] and item.attempt > attempt",
        "item.request ~= record[6]",
        None,
    ),
    Guard(
        "claim",
        "request: once",
        "item.request ~= '' and item.request ~= record[6] and",
        "item.request ~= '' and",
        None,
    ),
    Guard("claim", "request: not what is done", "(item.force or repeatable[state])", "true", None),
    Guard(
        "claim",
        "request: moves nothing on",
        "local ahead = item.request == '' and (",
        "local ahead = (",
        None,
    ),
    Guard(
        "confirm",
        "epoch compare",
        "record[2] ~= ARGV[1] or record[4] ~= ARGV[2]",
        "record[4] ~= ARGV[2]",
        None,
    ),
    Guard(
        "confirm",
        "claim compare",
        "if not state or record[2] ~= ARGV[1] or record[4] ~= ARGV[2] then",
        "if not state then",
        _DUPLICATE,
    ),
    Guard("confirm", "batch compare", " or record[4] ~= ARGV[2] then", " then", _DUPLICATE_WORKERS),
    Guard(
        "confirm",
        "state when sent",
        "if state == 'claimed' or state == 'unconfirmed' or state == 'returned' then",
        "if true then",
        _MISSED,
    ),
    Guard("confirm", "given back, and sent after all", " or state == 'returned' then", " then", _DUPLICATE),
    Guard("confirm", "state when unknown", "elseif state == 'claimed' then", "else", _MISSED),
    Guard(
        "give_back",
        "epoch compare",
        "record[2] ~= ARGV[1] or record[5] ~= ARGV[2]",
        "record[5] ~= ARGV[2]",
        None,
    ),
    Guard(
        "give_back",
        "claim compare",
        "if not state or record[2] ~= ARGV[1] or record[5] ~= ARGV[2] then",
        "if not state then",
        _DUPLICATE,
    ),
    Guard("give_back", "batch compare", " or record[5] ~= ARGV[2] then", " then", _WORKERS),
    Guard(
        "give_back", "state", "elseif state == 'claimed' or state == 'unconfirmed' then", "else", _DUPLICATE
    ),
    Guard("confirm", "sweep list: running", "if state ~= 'running' and state", "if state", _RERUN),
    Guard("confirm", "sweep list: given back", " and state ~= 'returned' then", " then", None),
    Guard("crash", "lease check", "if held ~= ARGV[1] then", "if false then", _RERUN_BY_THE_NEXT),
    Guard("crash", "run lease", "elseif now < ends then", "elseif false then", _RERUN),
    Guard("crash", "running", "if state ~= 'running' then", "if false then", None),
    Guard(
        "crash",
        "attempts",
        "record[3] == 'rerun' and attempt < (tonumber(record[5]) or 1)",
        "record[3] == 'rerun'",
        _RERUN_TWICE,
    ),
    Guard(
        "crash",
        "rerun alone",
        "record[3] == 'rerun' and attempt < (tonumber(record[5]) or 1)",
        "attempt < (tonumber(record[5]) or 1)",
        None,
    ),
    Guard(
        "crash", "skip", "elseif record[3] == 'rerun' or record[3] == 'skip' then", "elseif false then", _SKIP
    ),
    Guard("crash", "noted once", "elseif record[10] then", "elseif false then", None),
    Guard("crash", "the next attempt", "whole(attempt + 1)", "whole(attempt)", _RERUN),
    Guard("crash", "the dead run", "'batch', 'run', 'after'", "'batch', 'after'", _RERUN),
    Guard("crash", "the dead run's message", "'batch', 'run', 'after'", "'run', 'after'", _RERUN),
    Guard(
        "crash",
        "looked after again",
        "redis.call('ZADD', KEYS[2], whole(now), ARGV[i - 1])",
        "redis.call('ZREM', KEYS[2], ARGV[i - 1])",
        _RERUN,
    ),
    Guard("crash", "sweep list", "if state ~= 'claimed' and state ~= 'returned' then", "if true then", None),
    Guard("doubt", "lease check", "if held ~= ARGV[1] then", "if false then", _MISSED),
    Guard("doubt", "grace", "if now < ends then", "if false then", None),
    Guard("doubt", "older epoch", "(tonumber(record[2]) or 0) < epoch and ", "", _MISSED),
    Guard("doubt", "prefers a missed slot", " and record[3] ~= 'duplicate' then", " then", _DUPLICATE),
    Guard(
        "doubt",
        "claimed alone",
        "if state == 'claimed' and (tonumber",
        "if state ~= '' and (tonumber",
        _MISSED,
    ),
    Guard(
        "doubt",
        "sweep list",
        "if not looked_after[state] then",
        "if true then",
        _MISSED,
    ),
    Guard("doubt", "one range: neighbours", "if not (range and follows and ", "if not (range and ", None),
    Guard(
        "doubt", "one range: one leader", "follows and range.epoch == record[2]) then", "follows) then", None
    ),
    Guard("doubt", "one range: without a gap", "if not just_now then", "if false then", None),
    Guard("write_off", "lease check", "if held ~= ARGV[1] then", "if false then", _MISSES),
    Guard("write_off", "older epoch", "(tonumber(record[3]) or 0) < tonumber(ARGV[2])", "true", _MISSES),
    Guard(
        "write_off",
        "state",
        "if record[1] == 'returned' or (record[1] == 'claimed' and",
        "if record[1] ~= state and (record[1] ~= 'claimed' or",
        _MISSES,
    ),
    Guard(
        "write_off",
        "last decided, and counted once",
        "if without > 0 and (not entry.slot or tonumber(entry.slot) < tonumber(ARGV[5])) then",
        "if without > 0 then",
        _MISSES_OF_TWO,
    ),
    Guard(
        "write_off", "fresh ones alone make the range", "first = whole(tonumber(entry.slot) + 1)", "", None
    ),
    Guard("write_off", "records alone decide nothing", "if without > 0 and ", "if ", None),
    Guard(
        "begin",
        "epoch",
        "if epoch < (tonumber(record[2]) or 0) and state ~= 'returned'",
        "if false and state ~= 'returned'",
        _DUPLICATE,
    ),
    Guard("begin", "the only copy, after a return", " and state ~= 'returned'", "", None),
    Guard("begin", "the only copy, after a miss", " and state ~= 'missed'", "", None),
    Guard("begin", "the only copy, after a skip", " and state ~= 'skipped'", "", None),
    Guard(
        "begin", "attempt", "elseif attempt < (tonumber(record[3]) or 1) then", "elseif false then", _RERUN
    ),
    Guard("begin", "refused before", "elseif state == 'refused' then", "elseif false then", None),
    Guard("begin", "running elsewhere", "if not redelivered then", "if false then", _DUPLICATE_WORKERS),
    Guard("begin", "on_crash skip", "record[8] == 'skip' or ", "", _SKIP),
    Guard("begin", "on_crash rerun", " or record[8] == 'rerun'", "", _RERUN),
    Guard(
        "begin",
        "waits for the leader",
        "return {'put_off', tonumber(ARGV[7])}",
        "return refuse('the slot was begun by a worker that died')",
        _SKIP_FROZEN,
    ),
    Guard(
        "begin",
        "the leader knows of it",
        "redis.call('ZADD', KEYS[5], 'NX', whole(now), ARGV[10])",
        "",
        None,
    ),
    Guard(
        "begin",
        "looked after",
        "redis.call('ZADD', KEYS[5], whole(now + tonumber(ARGV[7])), ARGV[10])",
        "",
        _RERUN,
    ),
    Guard("begin", "run lease of the other", "elseif left > 0 then", "elseif false then", None),
    Guard("begin", "ended", "return refuse('the slot is ' .. state)", "", _WORKERS),
    Guard("begin", "waits for its retry", "return refuse('the slot waits for its retry')", "", _WORKERS),
    Guard("begin", "belongs to the run", "if after ~= holder_after then", "if false then", None),
    Guard("begin", "retry of the holder alone", "(after ~= '' and after == holder)", "(after ~= '')", None),
    Guard("begin", "retry of the holder at all", " and not (after ~= '' and after == holder)", "", _WORKERS),
    Guard("begin", "the same run again", "(holder == run or string", "(string", None),
    Guard(
        "begin",
        "asked before",
        " or string.find(ARGV[15], ' ' .. holder .. ' ', 1, true) ~= nil",
        "",
        _EARLY_ACKS,
    ),
    Guard("begin", "fencing current", "if epoch < leads then", "if false then", _CURRENT),
    Guard("begin", "fencing observed", "if epoch < seen then", "if false then", _OBSERVED),
    Guard(
        "begin", "fencing at the start alone", "if not begun then\n  local", "if true then\n  local", _CURRENT
    ),
    Guard(
        "begin",
        "a refusal stays",
        "redis.call('HSET', KEYS[1], 'state', 'refused', 'reason', reason)",
        "",
        _CURRENT,
    ),
    Guard(
        "finish",
        "run",
        "if record[2] ~= ARGV[1] or record[1] == 'abandoned' then",
        "if not record[2] then",
        _RERUN_TWICE,
    ),
    Guard("finish", "abandoned", " or record[1] == 'abandoned' then", " then", _SKIP),
    Guard("finish", "sweep list", "redis.call('ZREM', KEYS[3], record[5])", "", None),
    Guard("finish", "running", "if record[1] == 'running' then", "if true then", None),
    Guard(
        "finish",
        "requeued is not begun",
        "redis.call('HDEL', KEYS[1], 'run', 'after', 'run_until')",
        "",
        _WORKERS,
    ),
    Guard("finish", "requeued retry", "elseif after ~= '' then", "elseif false then", None),
    Guard("renew_run", "run", " and record[2] == ARGV[i] then", " then", _WORKERS),
    Guard("renew_run", "running", "if record[1] == 'running' and ", "if ", _SKIP),
    Guard("renew_run", "taken for dead", "    if record[5] then", "    if false then", None),
    Guard("pause", "one at a time", "and span.since or now\n", "and span.since or nil\n", None),
    Guard(
        "pause",
        "no end before the begin",
        "tonumber(span.since) > tonumber(now) and span.since or now",
        "now",
        None,
    ),
    Guard(
        "resume",
        "in force",
        "if not span['until'] or tonumber(span['until']) > tonumber(now) then",
        "if true then",
        None,
    ),
]
