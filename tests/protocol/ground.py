"""A ledger on a real server, as the contract tests use it: terms, claims, runs, and hands that move time."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import redis
from celery import Celery

from celery_leaderbeat.keys import Keys
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.orders import Orders
from celery_leaderbeat.records import Claim, SlotRecord, UnsentRange, Verdict
from celery_leaderbeat.release import Release
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import Stamp, slot_to_us, tick_key

__all__ = ["ENTRY", "FINGERPRINT", "FIRST", "Ground", "settings_for", "slot"]

ENTRY = "nightly"
FIRST = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
#: Of a schedule with these slots.
FINGERPRINT = "interval:60000000us"


def slot(number: int) -> datetime:
    """The slots of the tests are a minute apart."""
    return FIRST + timedelta(minutes=number)


def settings_for(url: str, main: str = "proj", events: int = 10_000) -> Settings:
    """The settings of an app whose ledger is at `url`."""
    app = Celery(main, broker="memory://", set_as_current=False)
    app.conf.leaderbeat_redis_url = url
    app.conf.leaderbeat_key_prefix = "protocol"
    app.conf.leaderbeat_events = events
    return Settings.from_app(app)


def _number(at: datetime) -> int:
    return (at - FIRST) // timedelta(minutes=1)


class Ground:
    """One prefix on one empty server.

    Parameters:
        url: where the server is.
        client: for looking at what the scripts wrote, and for moving time.
        settings: others than the default ones, as `settings_for` takes them.
    """

    def __init__(self, url: str, client: redis.Redis, **settings: Any) -> None:
        self.url = url
        self.settings = settings_for(url, **settings)
        self.ledger = Ledger(self.settings)
        self.store = self.ledger.store
        self.keys: Keys = self.store.keys
        self.client: Any = client

    def close(self) -> None:
        self.ledger.close()

    def stand(
        self,
        holder: str = "one",
        *,
        ttl: int = 15_000,
        highest: int = 0,
        app: str = "proj",
        takes_over: str = "",
        release: str = "",
        insists: bool = False,
        **attributes: Any,
    ) -> list[Any]:
        """The answer of `elect`."""
        answer: list[Any] = self.store.run(
            "elect",
            [
                self.keys.lease,
                self.keys.epoch,
                self.keys.app,
                self.keys.released,
                self.keys.replicas,
                self.keys.releases,
            ],
            [
                holder,
                ttl,
                highest,
                app,
                json.dumps({**attributes, **({"release": release} if release else {})}),
                takes_over,
                Release.read(release or None).rank,
                int(insists),
            ],
        )
        return answer

    def announce(
        self,
        holder: str,
        release: str = "",
        *,
        stands: bool = True,
        app: str = "proj",
        lifetime: float = 15.0,
    ) -> list[Any]:
        """The answer of `announce`."""
        answer: list[Any] = self.store.run(
            "announce",
            [self.keys.replicas, self.keys.releases, self.keys.app],
            [
                holder,
                lifetime,
                app,
                release,
                Release.read(release or None).rank,
                int(stands),
                self.keys.wake,
                0,
            ],
        )
        return answer

    def unseen(self, holder: str, seconds: float) -> None:
        """So many seconds have passed since the replica was seen."""
        self.client.zincrby(self.keys.replicas, -seconds, holder)

    def retreat(self, holder: str, seconds: float) -> int:
        """The answer of `retreat`, among those that were seen in the last 6 s."""
        answer: int = self.store.run(
            "retreat", [self.keys.retreats, self.keys.replicas], [holder, round(seconds * 1000), 6.0]
        )
        return answer

    def elect(self, holder: str = "one", **options: Any) -> Term:
        """A term that has just been won."""
        answer = self.stand(holder, **options)
        assert answer[0] == "elected", answer
        return Term.read(answer[1])

    def renew(self, term: Term, ttl: int = 15_000) -> list[Any]:
        keys = [self.keys.lease, self.keys.epoch]
        answer: list[Any] = self.store.run("renew", keys, [term.value, ttl, term.epoch])
        return answer

    def release(self, term: Term, newer: bool = False) -> str:
        answer: str = self.store.run(
            "release",
            [self.keys.lease, self.keys.released],
            [term.value, self.keys.wake, term.epoch, "stops", "", "1" if newer else ""],
        )
        return answer

    def lapse(self) -> None:
        """The lease's time is over."""
        self.client.delete(self.keys.lease)

    def next_term(self, holder: str = "two") -> Term:
        """The lease's time is over and `holder` is elected."""
        self.lapse()
        return self.elect(holder)

    def ask(
        self,
        term: Term,
        *numbers: int,
        batch: str = "batch",
        prefer: str = "missed",
        ttl: float = 3600.0,
        entry: str = ENTRY,
        attempt: int = 1,
        on_crash: str = "auto",
        max_attempts: int = 1,
        overlap: str = "allow",
        request: str = "",
        force: bool = False,
        unstarted: float = 3600.0,
        paced: bool = False,
        earlier: Sequence[str] | None = None,
    ) -> list[str]:
        """The answers of `claim` for slots by their numbers; `earlier`: what it looks at, by default all."""
        if earlier is None:
            earlier = self.open(entry) if overlap != "allow" else ()
        return self.ledger.claim(
            term,
            batch,
            [
                Claim(
                    key=self.key(number, entry),
                    entry=entry,
                    slot=slot(number),
                    fingerprint=FINGERPRINT,
                    task="proj.task",
                    task_id=f"id-{number}",
                    prefer=prefer,
                    ttl=ttl,
                    attempt=attempt,
                    on_crash=on_crash,
                    max_attempts=max_attempts,
                    overlap=overlap,
                    request=request,
                    force=force,
                    unstarted=unstarted,
                    paced=paced,
                    earlier=tuple(earlier),
                )
                for number in numbers
            ],
        )

    def claim(self, term: Term, *numbers: int, **options: Any) -> None:
        """Claim slots that are free."""
        assert self.ask(term, *numbers, **options) == ["claimed"] * len(numbers)

    def confirm(self, epoch: int, number: int, outcome: str = "sent", batch: str | None = None) -> str:
        """Confirm a slot for a batch; by default for the one that its record names."""
        batch = self.batch(number) if batch is None else batch
        return self.ledger.confirm(epoch, batch, {self.key(number): outcome})[0]

    def give_back(
        self, epoch: int, number: int, reason: str = "no connection", batch: str | None = None
    ) -> str:
        """Give a slot back for a batch; by default for the one that its record names."""
        batch = self.batch(number) if batch is None else batch
        return self.ledger.give_back(epoch, batch, [self.key(number)], reason)[0]

    def doubt(
        self, term: Term, *numbers: int, until: float = 0.0, following: Collection[int] = ()
    ) -> list[str]:
        keys = [self.key(number) for number in numbers]
        return self.ledger.doubt(term, keys, until, [self.key(number) for number in following])

    def crash(self, term: Term, *numbers: int) -> list[str]:
        return self.ledger.crash(term, [self.key(number) for number in numbers])

    def miss(
        self,
        term: Term,
        newest: int,
        count: int,
        returned: Sequence[int] = (),
        reason: str = "too late",
        state: str = "missed",
    ) -> int:
        keys = [self.key(number) for number in returned]
        oldest = slot(newest - count + 1)
        return self.ledger.write_off(
            term, state, ENTRY, oldest, slot(newest), count, reason, FINGERPRINT, keys
        )

    def begin(
        self,
        number: int,
        epoch: int,
        run: str = "run",
        *,
        attempt: int = 1,
        after: str = "",
        mode: str = "slot",
        redelivered: bool = False,
        run_lease: float = 30.0,
        task: str = "proj.task",
        asked: Sequence[str] = (),
    ) -> Verdict:
        stamp = Stamp(
            key=self.key(number), entry=ENTRY, slot=slot(number), epoch=epoch, attempt=attempt, run=after
        )
        return self.ledger.begin(
            stamp,
            run=run,
            mode=mode,
            redelivered=redelivered,
            run_lease=run_lease,
            worker="host:1",
            task=task,
            task_id=f"id-{number}",
            asked=asked,
        )

    def start(self, number: int, epoch: int, run: str = "run", **options: Any) -> None:
        """Begin a run that nothing stands against."""
        verdict = self.begin(number, epoch, run, **options)
        assert verdict.kind == "run", verdict

    def finish(
        self, number: int, run: str = "run", state: str = "done", reason: str = "", retry_in: float = 0.0
    ) -> bool:
        return self.ledger.finish(self.key(number), run, state, reason, retry_in)

    def renew_run(self, number: int, run: str = "run", run_lease: float = 30.0) -> bool:
        key = self.key(number)
        return self.ledger.renew_runs({key: run}, run_lease)[key]

    def let_run_lease_end(self, number: int) -> None:
        """The run's worker has died, and the run lease is over."""
        self.write(number, run_until=0)

    @property
    def orders(self) -> Orders:
        """The orders of somebody called ann."""
        return Orders(self.ledger, by="ann")

    @staticmethod
    def key(number: int, entry: str = ENTRY) -> str:
        return tick_key(entry, slot(number))

    def record_key(self, number: int) -> str:
        return self.keys.slot(self.key(number))

    def record(self, number: int) -> SlotRecord:
        record = self.ledger.slot(self.key(number))
        assert record is not None
        return record

    def batch(self, number: int) -> str:
        """The batch that the record of a slot names."""
        return self.client.hget(self.record_key(number), "batch") or ""

    def state(self, number: int) -> str:
        """The state of a slot's record; empty if there is none."""
        return self.client.hget(self.record_key(number), "state") or ""

    def fields(self, number: int) -> dict[str, str]:
        table: dict[str, str] = self.client.hgetall(self.record_key(number))
        return table

    def write(self, number: int, **fields: str | int) -> None:
        """Change fields of a record behind the scripts' back."""
        self.client.hset(self.record_key(number), mapping=fields)

    def ttl(self, number: int) -> int:
        left: int = self.client.pttl(self.record_key(number))
        return left

    def is_kept_long(self, number: int) -> bool:
        """Whether the record is kept as what somebody has to look after: for 400 days."""
        return self.ttl(number) > 399 * 86_400_000

    def last_decided(self, entry: str = ENTRY) -> int | None:
        """The number of the entry's last decided slot."""
        text = self.client.hget(self.keys.entries, entry)
        if text is None:
            return None
        return (int(json.loads(text)["slot"]) - slot_to_us(FIRST)) // 60_000_000

    def unfinished(self) -> set[str]:
        return set(self.client.zrange(self.keys.unfinished, 0, -1))

    def looked_at(self, number: int) -> int | None:
        """When a leader has to look after a slot, in ms; None if it hasn't to."""
        score = self.client.zscore(self.keys.unfinished, self.key(number))
        return None if score is None else int(score)

    def open(self, entry: str = ENTRY) -> tuple[str, ...]:
        """Tick keys of the entry's slots that may be unfinished."""
        kept = self.ledger.entries(entry).get(entry)
        return () if kept is None else kept.open

    def ranges(self, entry: str = ENTRY) -> list[tuple[str, int, int, int, str]]:
        """The entry's slots that were never sent: state, first, last, count, reason."""
        found = map(UnsentRange.read, self.client.zrange(self.keys.unsent(entry), 0, -1))
        return [(r.state, _number(r.first), _number(r.last), r.count, r.reason) for r in found]

    def events(self, *names: str) -> list[dict[str, str]]:
        """The events of these names, or all, oldest first."""
        found = [fields for _, fields in self.client.xrange(self.keys.events)]
        return [fields for fields in found if not names or fields["event"] in names]

    def told(self) -> list[str]:
        """The names of all events, oldest first."""
        return [fields["event"] for fields in self.events()]

    def everything(self) -> dict[str, Any]:
        """All that the server holds, to see that nothing was written."""
        found: dict[str, Any] = {}
        for key in sorted(self.client.keys()):
            kind = self.client.type(key)
            if kind == "string":
                found[key] = self.client.get(key)
            elif kind == "hash":
                found[key] = self.client.hgetall(key)
            elif kind == "stream":
                found[key] = self.client.xrange(key)
            else:
                found[key] = self.client.zrange(key, 0, -1, withscores=True)
        return found

    def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000
