"""The ledger: what Redis knows of every slot, from its claim to its end.

The leader's side, which is here, claims, confirms, gives back and misses slots; the worker's side begins and
finishes runs (`run_ledger`); everybody may read (`history`). Each decision is one script (see `scripts/`), and
each script can be asked again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from celery_leaderbeat.pauses import Pause, pauses_text
from celery_leaderbeat.records import (
    FAR_AHEAD,
    REMOVED_LIFETIME,
    Claim,
    EntryRecord,
    Recalled,
    SlotRecord,
)
from celery_leaderbeat.run_ledger import UNSTARTED, RunLedger
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import parse_tick_key, slot_from_us, slot_to_us

__all__ = ["HORIZON", "Ledger", "NotLeading", "NotReplicated"]

#: A stored slot this much later than now (seconds) was written by a clock that had jumped.
HORIZON = FAR_AHEAD / 1e6
#: Longest that a claim waits for its replicas, in seconds; and that a look at whether they are there again takes.
_REPLICATED_WITHIN, _LOOK_WITHIN = 1.0, 0.1
#: Entries, or slots, per script where there are many.
_CHUNK = 200

_APP_ATTRIBUTE = "_leaderbeat_ledger"


class NotLeading(Exception):
    """A script found that the term no longer holds the lease; it has written nothing."""


class NotReplicated(Exception):
    """Claims are written, but fewer Redis replicas than `leaderbeat_min_replicas` have them.

    Attributes:
        answers: what the claims were answered.
    """

    def __init__(self, answers: list[str], reason: str) -> None:
        super().__init__(reason)
        self.answers = answers


class Ledger(RunLedger):
    """The slots' records under one key prefix, over one connection."""

    @classmethod
    def for_app(cls, app: Any) -> Ledger:
        """The ledger of this process for `app`; connections aren't carried over a fork."""
        cached = getattr(app, _APP_ATTRIBUTE, None)
        if cached is None or cached[0] != os.getpid():
            cached = (os.getpid(), cls(Settings.from_app(app, warn=False)))
            setattr(app, _APP_ATTRIBUTE, cached)
        ledger: Ledger = cached[1]
        return ledger

    def register(
        self,
        term: Term,
        fingerprints: Mapping[str, str],
        now: datetime,
        stored: Mapping[str, EntryRecord] | None = None,
        recalled: Mapping[str, Recalled] = MappingProxyType({}),
        lost: str = "",
    ) -> dict[str, tuple[str, datetime]]:
        """Where each entry goes on: name -> (kept, new, changed, restored, recalled, reset, removed or forgotten; slot).

        Parameters:
            fingerprints: names all entries of the schedule.
            stored: the entries as the ledger has them, if they have been read.
            recalled: what the ledger has lost of entries.
            lost: why slots are missed of which nobody knows whether they were sent.

        Raises:
            NotLeading: the lease is gone; nothing was written.
        """
        now_us = slot_to_us(now)
        horizon_us = now_us + FAR_AHEAD
        limits = [str(now_us), str(horizon_us), str(now_us - REMOVED_LIFETIME), lost]
        stored = self.entries() if stored is None else stored
        defined = self.store.fields(self._keys.definitions)
        found = {name: ("kept", stored[name].slot) for name in fingerprints if name in stored}
        pairs = [
            (name, fingerprint)
            for name, fingerprint in fingerprints.items()
            if name not in stored
            or name in recalled
            or name not in defined
            or stored[name].fingerprint != fingerprint
            or stored[name].removed
            or slot_to_us(stored[name].slot) > horizon_us
        ]
        pairs += [(name, "") for name in {**stored, **recalled} if name not in fingerprints]
        for i in range(0, len(pairs), _CHUNK):
            chunk = pairs[i : i + _CHUNK]
            answer = self._leading(
                self.store.run(
                    "register",
                    [
                        self._keys.lease,
                        self._keys.entries,
                        self._keys.definitions,
                        self._keys.counts,
                        *(self._keys.unsent(name) for name, _ in chunk),
                    ],
                    [term.value, *limits, *(text for pair in chunk for text in _as_args(*pair, recalled))],
                )
            )
            for (name, _), kind, slot in zip(chunk, answer[::2], answer[1::2], strict=True):
                found[name] = (kind, slot_from_us(int(slot)))
        return found

    def entry_count(self) -> int:
        """Of how many entries something is kept."""
        return self.store.size(self._keys.entries)

    def recall_pauses(self, term: Term, pauses: Mapping[str, Sequence[Pause]]) -> int:
        """Put back pauses that the ledger has lost; returns for how many entries it had.

        Raises:
            NotLeading: the lease is gone; nothing was written.
        """
        args = [text for entry, spans in pauses.items() for text in (entry, pauses_text(spans))]
        keys = [self._keys.lease, self._keys.paused]
        return int(self._leading(self.store.run("recall_pauses", keys, [term.value, *args]))[0])

    def recall_slots(self, term: Term, slots: Sequence[Claim], reason: str) -> int:
        """Record slots again as given back, whose records the ledger has lost; returns how many it had lost.

        Raises:
            NotLeading: the lease is gone; nothing was written by the last request.
        """
        recalled = 0
        for i in range(0, len(slots), _CHUNK):
            chunk = slots[i : i + _CHUNK]
            keys = [self._keys.lease, self._keys.unfinished, *(self._keys.slot(slot.key) for slot in chunk)]
            items = [json.dumps(_record_of(slot)) for slot in chunk]
            answer = self.store.run("recall_slots", keys, [term.value, term.epoch, reason[:500], *items])
            recalled += int(self._leading(answer)[0])
        return recalled

    def claim(self, term: Term, batch: str, claims: Sequence[Claim]) -> list[str]:
        """Claim slots; for each `"claimed"`, or why not (see `claim.lua`). The same `batch` may ask again.

        Raises:
            NotLeading: the lease is gone; nothing was claimed.
            NotReplicated: too few replicas have the claims.
            StoreUnavailable: no answer; ask again with the same batch.
        """
        own = self._keys
        keys = [own.lease, own.entries, own.unfinished, own.counts, own.paused]
        keys += [own.slot(claim.key) for claim in claims]
        items = []
        for claim in claims:
            item: dict[str, Any] = {
                **_record_of(claim),
                "fingerprint": claim.fingerprint,
                "overlap": claim.overlap,
                "request": claim.request,
                "force": claim.force,
            }
            if claim.overlap != "allow":
                keys.append(own.unsent(claim.entry))
                item["unsent"] = len(keys)
                item["paced"] = claim.paced
                item["earlier"] = [len(keys) + 1 + i for i in range(len(claim.earlier))]
                item["unstarted"] = min(round(claim.unstarted * 1000), UNSTARTED)
                keys += map(own.slot, claim.earlier)
            items.append(json.dumps(item))
        args: list[str | int | float] = [term.value, term.epoch, batch, *items]
        wanted = self.settings.min_replicas
        if not wanted:
            return [str(text) for text in self._leading(self.store.run("claim", keys, args))]
        within = min(_REPLICATED_WITHIN, self.settings.publish_timeout / 2)
        answer, found, refusal = self.store.run_replicated("claim", keys, args, wanted, within)
        answers = [str(text) for text in self._leading(answer)]
        if found < wanted and "claimed" in answers:
            few = f"{found} of {wanted} Redis replicas had a claim within {within:g} s"
            raise NotReplicated(answers, f"Redis refuses to wait for replicas: {refusal}" if refusal else few)
        return answers

    def replicas_answer(self) -> bool:
        """Whether as many Redis replicas as `leaderbeat_min_replicas` have what this connection has written.

        Raises:
            StoreError: the server doesn't answer, or refuses to say.
        """
        wanted = self.settings.min_replicas
        return self.store.replicas(wanted, _LOOK_WITHIN) >= wanted

    def confirm(self, epoch: int, batch: str, outcomes: Mapping[str, str]) -> list[str]:
        """Note what became of a batch's claims: tick key -> `"sent"` or `"unconfirmed"`.

        Returns the states.
        """
        answer = self.store.run(
            "confirm",
            [self._keys.unfinished, self._keys.counts, *map(self._keys.slot, outcomes)],
            [epoch, batch, *outcomes.values()],
        )
        return [str(text) for text in answer]

    def give_back(self, epoch: int, batch: str, keys: Sequence[str], reason: str) -> list[str]:
        """Give back claims of a batch that are known to be unsent. Returns the states."""
        answer = self.store.run(
            "give_back", [self._keys.unfinished, *map(self._keys.slot, keys)], [epoch, batch, reason[:500]]
        )
        return [str(text) for text in answer]

    def doubt(
        self, term: Term, keys: Sequence[str], until: float, following: Collection[str] = ()
    ) -> list[str]:
        """Count older epochs' unconfirmed claims as missed from `until` on (Unix seconds).

        Returns the states. `following` are those of the keys whose slot is its entry's next one after that of the key
        before it: neighbours are one range.

        Raises:
            NotLeading: the lease is gone; nothing was written.
        """
        own = self._keys
        states: list[str] = []
        for i in range(0, len(keys), _CHUNK):
            chunk = keys[i : i + _CHUNK]
            answer = self.store.run(
                "doubt",
                [own.lease, own.unfinished, own.counts, *map(own.slot, chunk)],
                [
                    term.value,
                    term.epoch,
                    round(until * 1000),
                    *(text for key in chunk for text in (key, "1" if key in following else "")),
                ],
            )
            states += [str(text) for text in self._leading(answer)]
        return states

    def write_off(
        self,
        term: Term,
        state: str,
        entry: str,
        oldest: datetime,
        newest: datetime,
        count: int,
        reason: str,
        fingerprint: str,
        returned: Sequence[str] = (),
    ) -> int:
        """Decide that `count` slots will never be sent; `returned` names those that have records.

        `state` is `"missed"`, or `"skipped"` where that is on purpose. Returns how many got that end by this
        call.

        Raises:
            NotLeading: the lease is gone; nothing was written.
        """
        own = self._keys
        keys = [own.lease, own.entries, own.unfinished, own.counts, own.unsent(entry)]
        answer = self.store.run(
            "write_off",
            [*keys, *map(own.slot, returned)],
            [
                term.value,
                term.epoch,
                entry,
                slot_to_us(oldest),
                slot_to_us(newest),
                count,
                reason[:500],
                fingerprint,
                state,
                *(slot_to_us(parse_tick_key(key)[1]) for key in returned),
            ],
        )
        return int(self._leading(answer)[0])

    def crash(self, term: Term, keys: Sequence[str]) -> list[str]:
        """Decide what becomes of running slots whose run lease is over. Returns the states (see `crash.lua`).

        Raises:
            NotLeading: the lease is gone; nothing was written.
        """
        own = self._keys
        states: list[str] = []
        for i in range(0, len(keys), _CHUNK):
            chunk = keys[i : i + _CHUNK]
            answer = self.store.run(
                "crash",
                [own.lease, own.unfinished, own.counts, *map(own.slot, chunk)],
                [term.value, UNSTARTED, *chunk],
            )
            states += [str(text) for text in self._leading(answer)]
        return states

    def unfinished(self) -> list[SlotRecord | str]:
        """Slots that a leader has to look after now; a bare tick key where no record can be read."""
        keys = self.store.due_members(self._keys.unfinished)
        return [record or key for key, record in self.slots(keys).items()]

    @staticmethod
    def _leading(answer: list[Any]) -> list[Any]:
        if answer[0] != 1:
            raise NotLeading(answer[1])
        return answer[1:]


def _record_of(claim: Claim) -> dict[str, str | int]:
    """What a slot's record takes from its claim."""
    return {
        "key": claim.key,
        "entry": claim.entry,
        "slot": str(slot_to_us(claim.slot)),
        "task": claim.task,
        "task_id": claim.task_id,
        "attempt": claim.attempt,
        "prefer": claim.prefer,
        "ttl": round(claim.ttl * 1000),
        "on_crash": claim.on_crash,
        "max_attempts": claim.max_attempts,
    }


def _as_args(name: str, fingerprint: str, recalled: Mapping[str, Recalled]) -> tuple[str, str, str, str]:
    """An entry's part of the arguments of `register`."""
    known = recalled.get(name, Recalled())
    lost = ""
    if known.first is not None and known.last is not None:
        span = {"first": str(slot_to_us(known.first)), "last": str(slot_to_us(known.last))}
        lost = json.dumps({**span, "count": known.count})
    return name, fingerprint, known.record, lost
