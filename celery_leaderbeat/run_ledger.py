"""The worker's side of the ledger: runs begin, are renewed, and finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from celery_leaderbeat.history import LedgerReader
from celery_leaderbeat.records import Verdict
from celery_leaderbeat.tick import Stamp, slot_to_us

__all__ = ["UNSTARTED", "RunLedger"]

#: How long a slot counts as unfinished that no worker has begun, or that waits for its retry or its next attempt,
#: in ms.
UNSTARTED = 3_600_000


class RunLedger(LedgerReader):
    """What a worker asks about the run of a slot, and tells of it."""

    def begin(
        self,
        stamp: Stamp,
        *,
        run: str,
        mode: str,
        redelivered: bool,
        run_lease: float,
        worker: str,
        task: str,
        task_id: str,
        asked: Sequence[str] = (),
    ) -> Verdict:
        """Ask whether the message with `stamp` may run now, and record the run `run` if so.

        `asked` are the runs under which the same message asked before without seeing the answer.

        Raises:
            StoreUnavailable: no answer; ask again with the same `run`.
        """
        answer = self.store.run(
            "begin",
            [
                self._keys.slot(stamp.key),
                self._keys.epoch,
                self._keys.observed,
                self._keys.counts,
                self._keys.unfinished,
            ],
            [
                run,
                stamp.epoch,
                stamp.attempt,
                stamp.run,
                mode,
                "1" if redelivered else "0",
                round(run_lease * 1000),
                round(self.settings.slot_retention * 1000),
                worker,
                stamp.key,
                stamp.entry,
                slot_to_us(stamp.slot),
                task,
                task_id,
                f" {' '.join(asked)} ",
            ],
        )
        if answer[0] == "refuse":
            return Verdict("refuse", reason=str(answer[1]))
        if answer[0] == "put_off":
            return Verdict("put_off", seconds=int(answer[1]) / 1000)
        return Verdict("run", new=not answer[1])

    def finish(self, key: str, run: str, state: str, reason: str = "", retry_in: float = 0.0) -> bool:
        """Record how the run ended (`done`, `failed`, `retrying`); False if it no longer held the slot.

        `retry_in`: seconds until the retry is due.
        """
        answer = self.store.run(
            "finish",
            [self._keys.slot(key), self._keys.counts, self._keys.unfinished],
            [run, state, reason[:500], round(retry_in * 1000) + UNSTARTED],
        )
        return bool(answer[0])

    def renew_runs(self, runs: Mapping[str, str], run_lease: float) -> dict[str, bool]:
        """Extend the run leases of `runs` (tick key -> run); for each whether it still holds its slot."""
        keys = list(runs)
        answer = self.store.run(
            "renew_run",
            [self._keys.unfinished, *map(self._keys.slot, keys)],
            [round(run_lease * 1000), *runs.values()],
        )
        return {key: bool(held) for key, held in zip(keys, answer, strict=True)}
