"""The scripts as a function of what the server holds: `image, request -> answer, image`.

An image is all that a ledger holds in Redis without what only says when: times, scores and TTLs. A request is
run by a real server that has been brought to the part of the image that the script is given as KEYS, once;
asked again, it is answered from memory.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import redis

from celery_leaderbeat import store as store_module
from celery_leaderbeat.ledger import Ledger, NotLeading
from celery_leaderbeat.records import Claim
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import Stamp, slot_to_us, task_id, tick_key
from tests.protocol.ground import ENTRY, settings_for, slot

__all__ = ["FIRST_EPOCH", "Image", "Images", "empty", "lease_value"]

#: Above the server's clock, so that each election adds one and the same history has the same epochs.
FIRST_EPOCH = 5_000_000_000

_TASK = "proj.task"
_TTL = 3_600_000
_FAR_AHEAD = "9999999999999"
#: Many commands at once.
_ALL = """
local answers = {}
for i, command in ipairs(cjson.decode(ARGV[1])) do
  answers[i] = redis.call(unpack(command))
end
return answers
"""
#: What each script is given, by its KEYS: it can't tell worlds apart that differ elsewhere.
_PARTS = {
    "elect": frozenset({"lease", "epoch"}),
    "renew": frozenset({"lease", "epoch"}),
    "release": frozenset({"lease"}),
    "claim": frozenset({"lease", "entry", "unfinished", "records"}),
    "confirm": frozenset({"unfinished", "records"}),
    "give_back": frozenset({"unfinished", "records"}),
    "doubt": frozenset({"lease", "unfinished", "records"}),
    "write_off": frozenset({"lease", "entry", "unfinished", "records"}),
    "crash": frozenset({"lease", "unfinished", "records"}),
    "begin": frozenset({"epoch", "observed", "unfinished", "records"}),
    "finish": frozenset({"unfinished", "records"}),
    "renew_run": frozenset({"unfinished", "records"}),
}
# Equal for all records of a slot, or no part of any decision but that on a grace or a run's lease.
_LEFT_OUT = {
    *("key", "entry", "slot", "task", "task_id", "ttl", "worker", "reason"),
    *("claimed_at", "sent_at", "started_at", "finished_at", "busy_until"),
}


class Image(NamedTuple):
    """What the server holds. Slots are numbers; a record is a tuple of its fields, empty if there is none."""

    lease: str
    epoch: int
    entry: tuple[int, int, int]  # the last decided slot (-1: none yet), count, missed
    unfinished: tuple[int, ...]
    records: tuple[tuple[tuple[str, str], ...], ...]
    observed: int

    def field(self, number: int, name: str) -> str:
        return dict(self.records[number]).get(name, "")

    def state(self, number: int) -> str:
        return self.field(number, "state")

    def with_lease_over(self) -> Image:
        return self._replace(lease="")

    def with_run_lease_over(self, number: int) -> Image:
        fields = {**dict(self.records[number]), "run_until": "over"}
        records = list(self.records)
        records[number] = tuple(sorted(fields.items()))
        return self._replace(records=tuple(records))


def empty(slots: int) -> Image:
    """A server on which nobody has ever led."""
    return Image("", FIRST_EPOCH, (-1, 0, 0), (), ((),) * slots, 0)


@cache
def lease_value(holder: str, epoch: int) -> str:
    """The value of a lease without the time of the election."""
    return json.dumps({"app": "proj", "epoch": epoch, "holder": holder}, sort_keys=True)


class Images:
    """Runs requests on a server.

    Parameters:
        url: where the server is; the database is emptied all the time.
        client: of the same database.
        memory: answers that are known already, by image, request and text of the script.
    """

    def __init__(self, url: str, client: redis.Redis, memory: dict[Any, Any] | None = None) -> None:
        self._ledger = Ledger(settings_for(url, events=0))
        self._store = self._ledger.store
        self._keys = self._store.keys
        self._all: Any = client.register_script(_ALL)
        self._memory = {} if memory is None else memory
        self._texts: dict[str, int] = {}
        self._held: Image | None = None
        self.asked = 0

    def close(self) -> None:
        self._ledger.close()

    def ask(self, image: Image, script: str, *args: Any) -> tuple[Any, Image]:
        """The answer of a script to `args`, and what the server holds then."""
        text = self._texts.get(script)
        if text is None:
            text = self._texts[script] = hash(store_module._source(script))
        key = (image, script, text, args)
        found: tuple[Any, Image] | None = self._memory.get(key)
        if found is None:
            parts = _PARTS[script]
            slots = _slots(script, args)
            seen = _only(image, parts, slots)
            small = (seen, script, text, args)
            run: tuple[Any, Image] | None = self._memory.get(small)
            if run is None:
                run = self._memory[small] = self._run(seen, script, args)
                assert _only(run[1], parts, slots) == run[1], f"{script} writes what isn't among its keys"
            answer, after = run
            found = self._memory[key] = (answer, _merged(image, after, parts, slots))
        return found

    def _run(self, image: Image, script: str, args: tuple[Any, ...]) -> tuple[Any, Image]:
        self.asked += 1
        if image != self._held:
            self._bring(image)
        answer = getattr(self, f"_{script}")(*args)
        after = self._look(len(image.records))
        # A new lease still has its time in its value.
        self._held = None if script == "elect" else after
        return answer, after

    def _elect(self, holder: str, highest: int, takes_over: str) -> tuple[str, str]:
        kind, value, *_ = self._store.run(
            "elect",
            [
                self._keys.lease,
                self._keys.epoch,
                self._keys.app,
                self._keys.released,
                self._keys.replicas,
                self._keys.releases,
            ],
            [holder, 600_000, highest, "proj", "{}", takes_over, "", 0],
        )
        return kind, _timeless(value)

    def _renew(self, value: str) -> bool:
        keys = [self._keys.lease, self._keys.epoch]
        return bool(self._store.run("renew", keys, [value, 600_000, json.loads(value)["epoch"]])[0])

    def _release(self, value: str) -> bool:
        keys = [self._keys.lease, self._keys.released]
        return bool(
            self._store.run("release", keys, [value, self._keys.wake, 0, "stops", "", ""]) == "released"
        )

    def _claim(
        self,
        value: str,
        batch: str,
        numbers: tuple[int, ...],
        attempts: tuple[int, ...],
        prefer: str,
        on_crash: str,
        max_attempts: int,
    ) -> tuple[str, ...] | None:
        claims = [
            Claim(
                key=_key(number),
                entry=ENTRY,
                slot=slot(number),
                fingerprint="f",
                task=_TASK,
                task_id=task_id("protocol", _key(number), attempt),
                prefer=prefer,
                ttl=_TTL / 1000,
                attempt=attempt,
                on_crash=on_crash,
                max_attempts=max_attempts,
            )
            for number, attempt in zip(numbers, attempts, strict=True)
        ]
        try:
            return tuple(self._ledger.claim(Term.read(value), batch, claims))
        except NotLeading:
            return None

    def _confirm(self, epoch: int, number: int, batch: str, outcome: str) -> str:
        return self._ledger.confirm(epoch, batch, {_key(number): outcome})[0]

    def _give_back(self, epoch: int, number: int, batch: str) -> str:
        return self._ledger.give_back(epoch, batch, [_key(number)], "unsent")[0]

    def _doubt(self, value: str, number: int) -> str | None:
        try:
            return self._ledger.doubt(Term.read(value), [_key(number)], 0.0)[0]
        except NotLeading:
            return None

    def _crash(self, value: str, number: int) -> str | None:
        try:
            return self._ledger.crash(Term.read(value), [_key(number)])[0]
        except NotLeading:
            return None

    def _write_off(self, value: str, number: int, has_record: bool) -> int | None:
        keys = [_key(number)] if has_record else []
        try:
            when = slot(number)
            return self._ledger.write_off(Term.read(value), "missed", ENTRY, when, when, 1, "late", "f", keys)
        except NotLeading:
            return None

    def _begin(
        self,
        number: int,
        epoch: int,
        attempt: int,
        run: str,
        after: str,
        redelivered: bool,
        asked: tuple[str, ...],
        mode: str,
    ) -> tuple[str, str]:
        stamp = Stamp(
            key=_key(number), entry=ENTRY, slot=slot(number), epoch=epoch, attempt=attempt, run=after
        )
        verdict = self._ledger.begin(
            stamp,
            run=run,
            mode=mode,
            redelivered=redelivered,
            run_lease=600,
            worker="w",
            task=_TASK,
            task_id="id",
            asked=asked,
        )
        return verdict.kind, verdict.reason

    def _finish(self, number: int, run: str, state: str) -> bool:
        return self._ledger.finish(_key(number), run, state)

    def _renew_run(self, number: int, run: str) -> bool:
        return self._ledger.renew_runs({_key(number): run}, 600)[_key(number)]

    def _bring(self, image: Image) -> None:
        keys = self._keys
        commands: list[list[str | int]] = [
            ["FLUSHDB"],
            ["SET", keys.app, "proj"],
            ["SET", keys.epoch, str(image.epoch)],
        ]
        if image.lease:
            commands.append(["SET", keys.lease, image.lease, "PX", 600_000])
        last, count, missed = image.entry
        if last >= 0:
            entry = {"slot": _us(last), "fingerprint": "f", "count": count, "missed": missed}
            commands.append(["HSET", keys.entries, ENTRY, json.dumps(entry)])
        commands += [["ZADD", keys.unfinished, 1, _key(number)] for number in image.unfinished]
        for number, record in enumerate(image.records):
            if record:
                fields: dict[str, str | int] = {
                    "key": _key(number),
                    "entry": ENTRY,
                    "slot": _us(number),
                    "ttl": str(_TTL),
                    "task": _TASK,
                    "task_id": "id",
                    "claimed_at": 1,
                    **dict(record),
                }
                if "run_until" in fields:
                    fields["run_until"] = _FAR_AHEAD if fields["run_until"] == "live" else "0"
                commands.append(["HSET", keys.slot(_key(number)), *chain.from_iterable(fields.items())])
        if image.observed:
            commands.append(["HSET", keys.observed, _TASK, str(image.observed)])
        self._all(args=[json.dumps(commands)])

    def _look(self, slots: int) -> Image:
        keys = self._keys
        commands = [
            ["GET", keys.lease],
            ["GET", keys.epoch],
            ["HGET", keys.entries, ENTRY],
            ["ZRANGE", keys.unfinished, 0, -1],
            ["HGET", keys.observed, _TASK],
            *(["HGETALL", keys.slot(_key(number))] for number in range(slots)),
        ]
        lease, epoch, text, unfinished, observed, *rows = self._all(args=[json.dumps(commands)])
        entry = json.loads(text) if text else {"slot": _us(-1)}
        return Image(
            lease=_timeless(lease) if lease else "",
            epoch=int(epoch),
            entry=(_number(entry["slot"]), int(entry.get("count", 0)), int(entry.get("missed", 0))),
            unfinished=tuple(number for number in range(slots) if _key(number) in unfinished),
            records=tuple(_record(dict(zip(row[::2], row[1::2], strict=True))) for row in rows),
            observed=int(observed or 0),
        )


def _slots(script: str, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The slots that a request is about."""
    if "records" not in _PARTS[script]:
        return ()
    if script == "claim":
        numbers: tuple[int, ...] = args[2]
        return numbers
    number: int = args[0 if script in ("begin", "finish", "renew_run") else 1]
    return (number,)


def _only(image: Image, parts: frozenset[str], slots: tuple[int, ...]) -> Image:
    """The image without what a script isn't given."""
    bare = empty(len(image.records))
    kept = {name: getattr(image, name) for name in parts - {"unfinished", "records"}}
    if "records" in parts:
        kept["records"] = tuple(r if number in slots else () for number, r in enumerate(image.records))
    if "unfinished" in parts:
        kept["unfinished"] = tuple(number for number in image.unfinished if number in slots)
    return bare._replace(**kept)


def _merged(image: Image, after: Image, parts: frozenset[str], slots: tuple[int, ...]) -> Image:
    """The image with what a script has made of its part."""
    new = {name: getattr(after, name) for name in parts - {"unfinished", "records"}}
    if "records" in parts:
        pairs = enumerate(zip(image.records, after.records, strict=True))
        new["records"] = tuple(b if number in slots else a for number, (a, b) in pairs)
    if "unfinished" in parts:
        others = {number for number in image.unfinished if number not in slots}
        new["unfinished"] = tuple(sorted(others.union(after.unfinished)))
    merged = image._replace(**new)
    return image if merged == image else merged


def _record(table: dict[str, str]) -> tuple[tuple[str, str], ...]:
    kept = {name: text for name, text in table.items() if name not in _LEFT_OUT}
    if "run_until" in kept:
        # A run lease that the scripts have just written lasts for minutes.
        kept["run_until"] = "live" if int(kept["run_until"]) > 1 else "over"
    if "died_at" in kept:
        kept["died_at"] = "1"
    return tuple(sorted(kept.items()))


def _timeless(value: str) -> str:
    lease = json.loads(value)
    return lease_value(lease["holder"], lease["epoch"])


@cache
def _key(number: int) -> str:
    return tick_key(ENTRY, slot(number))


@cache
def _us(number: int) -> str:
    return str(slot_to_us(slot(number)))


def _number(us: str) -> int:
    return (int(us) - slot_to_us(slot(0))) // 60_000_000
