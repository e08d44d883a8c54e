"""What workers and the broker do in a world, and what must hold of the answers that workers get."""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.images import Images
from tests.protocol.leader_moves import Move
from tests.protocol.world import Message, Past, Rules, Worker, World, put, require

__all__ = ["WorkerMoves"]


class WorkerMoves:
    """The moves of all workers, and of time against them."""

    def __init__(self, rules: Rules, images: Images) -> None:
        self._rules = rules
        self._ask = images.ask

    def moves(self, world: World) -> Iterator[Move]:
        yield from self._lapse(world)
        yield from self._late(world)
        for i, message in enumerate(world.queue):
            if not i or message != world.queue[i - 1]:
                yield from self._deliver(world, i, message)
        for number, worker in enumerate(world.workers):
            if worker is not None and not (number and worker == world.workers[number - 1]):
                yield from self._go_on(world, number, worker)
                if world.faults:
                    yield from self._mishap(world, number, worker)

    def _lapse(self, world: World) -> Iterator[Move]:
        for slot in range(self._rules.slots):
            if world.image.state(slot) != "running" or world.image.field(slot, "run_until") != "live":
                continue
            run = world.image.field(slot, "run")
            if not any(w is not None and w.run == run for w in world.workers):
                after = world._replace(image=world.image.with_run_lease_over(slot))
                yield f"the lease of {run}, which is dead, is over", True, after

    def _deliver(self, world: World, index: int, message: Message) -> Iterator[Move]:
        run = _new_run(world)
        rest = world._replace(queue=world.queue[:index] + world.queue[index + 1 :])
        kind, after = self._begun(rest, message, run)
        what = f"a worker takes {_said(message)} as {run}: {kind}"
        if None in world.workers:
            if kind == "run":
                busy = Worker(message, run, "running", False)
                yield what, True, _set(after, world.workers.index(None), busy)
            elif kind == "refuse":
                yield what, True, after
            else:
                yield what, True, _queue(after, message._replace(redelivered=True))
        if world.faults:
            # Without an answer the message is put off; the run that the record may name doesn't exist.
            again = message._replace(redelivered=self._rules.acks_late, asked=(*message.asked, run))
            waits = _fault(_queue(rest, again))
            late = waits._replace(away=tuple(sorted((*waits.away, ("begin", message, run)), key=repr)))
            yield f"a worker asks for {_said(message)} as {run}, which may come late", False, late
            if kind == "run":
                yield f"{what}, and the answer is lost", False, _fault(_queue(after, again))

    def _late(self, world: World) -> Iterator[Move]:
        for i, item in enumerate(world.away):
            if item[0] == "begin":
                _, message, run = item
                rest = world._replace(away=world.away[:i] + world.away[i + 1 :])
                kind, after = self._begun(rest, message, run)
                older = message.epoch < world.past[message.slot].owner
                if kind == "run" and older and self._rules.on_crash == "auto":
                    # A known limit: its message may have been refused meanwhile, for the newer claim that has
                    # been given back since. Nothing tells this run from one that died with its message.
                    past = after.past[message.slot]._replace(lost=True)
                    after = after._replace(past=put(after.past, message.slot, past))
                yield f"the request of {run} arrives late: {kind}", False, after

    def _begun(self, world: World, message: Message, run: str) -> tuple[str, World]:
        slot, before = message.slot, world.image
        says = message.epoch, message.attempt, run, message.after, message.redelivered, message.asked
        (kind, _), image = self._ask(before, "begin", slot, *says, self._rules.mode)
        past = world.past[slot]
        started = bool(past.holder)
        if kind == "run":
            self._let_in(world, message, past)
            seen = world.seen
            if self._rules.mode == "observed" and not started:
                seen = max(seen, message.epoch)
            older = message.epoch < past.owner
            past = past._replace(
                owner=message.epoch,
                arrived=message.epoch if older else past.arrived,
                holder=run,
                holder_after=message.after,
                ended=False,
                abandoned=False,
            )
            return kind, world._replace(image=image, past=put(world.past, slot, past), seen=seen)
        if self._rules.mode == "slot" or started:
            require(image == before, "A message that isn't let in changes nothing.")
        if kind == "put_off":
            require(bool(past.holder) and message.redelivered, "Only a redelivery waits, and only for a run.")
        elif (message.epoch, message.attempt) == (past.owner, past.attempt):
            past = past._replace(refused=message.epoch)
        return kind, world._replace(image=image, past=put(world.past, slot, past))

    def _let_in(self, world: World, message: Message, past: Past) -> None:
        require(
            message.epoch >= past.owner or past.claim in ("given back", "missed"),
            "A slot that a newer epoch claimed, and may send, isn't run for the older.",
        )
        require(message.attempt == past.attempt, "What was sent as a superseded attempt isn't run.")
        require(not past.done, "A slot isn't started again after it is done.")
        others = [w for w in world.workers if w is not None and w.message.slot == message.slot]
        for other in others:
            # A run that has sent its retry has given the slot to it.
            gave_up = other.phase == "ended" or (
                other.phase == "retry sent" and (other.run != past.holder or message.after == other.run)
            )
            require(gave_up or other.frozen, "At most one run of a slot lives at a time.")
        if past.holder:
            retry = message.after == past.holder
            dead = all(other.run != past.holder or other.frozen for other in others)
            redelivery = (
                self._rules.on_crash == "auto"
                and message.redelivered
                and message.after == past.holder_after
                and not past.ended
                and dead
            )
            never_began = past.holder in message.asked
            require(
                retry or redelivery or never_began,
                "A slot starts once; then only its retry, its redelivery, or who never saw the answer, goes on.",
            )
            return
        if self._rules.mode == "current":
            require(
                message.epoch >= world.newest, "Under `current` nothing starts that is older than the leader."
            )
        elif self._rules.mode == "observed":
            require(
                message.epoch >= world.seen, "Under `observed` nothing starts that is older than what was."
            )

    def _go_on(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        slot = worker.message.slot
        if worker.phase == "ended":
            yield f"{worker.run} is acknowledged", True, _set(world, number, None)
        elif worker.phase == "retry sent":
            after = self._finished(world, number, worker, "retrying")
            yield f"{worker.run} ends with a retry", True, after
        else:
            yield f"{worker.run} is done", True, self._finished(world, number, worker, "done")
            if worker.frozen:
                held, image = self._ask(world.image, "renew_run", slot, worker.run)
                past = world.past[slot]
                holds = past.holder == worker.run and not past.ended and not past.abandoned
                require(held == holds, "The run lease is extended for the run that holds the slot alone.")
                if held:
                    others = [w for w in world.workers if w is not None and w is not worker]
                    require(
                        all(o.message.slot != slot or o.phase != "running" or o.frozen for o in others),
                        "At most one run of a slot lives at a time.",
                    )
                    thawed = _set(world, number, worker._replace(frozen=False))._replace(image=image)
                    yield f"{worker.run} thaws", True, thawed

    def _finished(self, world: World, number: int, worker: Worker, state: str) -> World:
        slot = worker.message.slot
        past = world.past[slot]
        held, image = self._ask(world.image, "finish", slot, worker.run, state)
        holds = past.holder == worker.run and not past.abandoned
        # A run whose retry has taken the slot and been rejected may be told either: there is nothing to write.
        either = state == "retrying" and not held
        require(held == holds or either, "The run that holds the slot, and no other, says how it ended.")
        if not held:
            require(image == world.image, "A run that lost the slot doesn't write how it ended.")
            past = past._replace(unheld=past.unheld or state == "done")
        elif state == "done":
            require(not past.done, "A slot is done once.")
            # What else was is no matter any more.
            past = Past(
                past.owner,
                past.batch,
                attempt=past.attempt,
                holder=past.holder,
                holder_after=past.holder_after,
                ended=True,
                done=1,
            )
        elif state == "requeued":
            # The slot is as it was before: not begun, or waiting for this very retry.
            parent = worker.message.after
            past = past._replace(holder=parent, holder_after="", ended=bool(parent))
        else:
            past = past._replace(ended=True)
        world = world._replace(image=image, past=put(world.past, slot, past))
        if state == "requeued":
            return self._left(world, number, worker)
        return _set(world, number, worker._replace(phase="ended") if self._rules.acks_late else None)

    def _left(self, world: World, number: int, worker: Worker) -> World:
        """A worker leaves its message to the broker, which has delivered it again before if it heard no more of it."""
        rest = _set(world, number, None)
        return rest if worker.cut_off else _queue(rest, worker.message._replace(redelivered=True))

    def _mishap(self, world: World, number: int, worker: Worker) -> Iterator[Move]:
        slot = worker.message.slot
        gone = _fault(_set(world, number, None))
        if self._rules.acks_late:
            yield f"the worker of {worker.run} dies", False, _fault(self._left(world, number, worker))
            if not worker.cut_off:
                twice = _set(world, number, worker._replace(cut_off=True))
                again = worker.message._replace(redelivered=True)
                yield (
                    f"the broker delivers the message of {worker.run} again",
                    False,
                    _fault(_queue(twice, again)),
                )
        else:
            # Where the leader looks after dead runs, it isn't needed that the broker does.
            lost = world.past[slot]._replace(lost=self._rules.on_crash == "auto")
            yield f"the worker of {worker.run} dies", False, gone._replace(past=put(world.past, slot, lost))
        if worker.phase != "running":
            return
        retry = _queue(world, Message(slot, worker.message.epoch, worker.message.attempt, worker.run, False))
        yield (
            f"{worker.run} sends its retry",
            False,
            _fault(_set(retry, number, worker._replace(phase="retry sent"))),
        )
        if self._rules.acks_late:
            requeued = self._finished(world, number, worker, "requeued")
            yield f"{worker.run} rejects its message back into the queue", False, _fault(requeued)
        if not worker.frozen and (self._rules.acks_late or self._rules.on_crash != "auto"):
            image = world.image
            if image.field(slot, "run") == worker.run and image.field(slot, "run_until") == "live":
                image = image.with_run_lease_over(slot)
            frozen = _set(world, number, worker._replace(frozen=True))._replace(image=image)
            yield f"{worker.run} freezes for longer than its lease", False, _fault(frozen)


def _said(message: Message) -> str:
    what = f"the retry of {message.after}" if message.after else "the message"
    again = ", delivered before," if message.redelivered else ""
    attempt = f" as attempt {message.attempt}" if message.attempt > 1 else ""
    return f"{what} of {message.slot} under epoch {message.epoch % 1_000}{attempt}{again}"


def _new_run(world: World) -> str:
    """A name that no record, worker or message knows."""
    known: set[str] = set()
    for slot, past in enumerate(world.past):
        known |= {past.holder, past.holder_after}
        known |= {world.image.field(slot, "run"), world.image.field(slot, "after")}
    for worker in world.workers:
        if worker is not None:
            known |= {worker.run, worker.message.after, *worker.message.asked}
    for message in world.queue:
        known |= {message.after, *message.asked}
    for item in world.away:
        if item[0] == "begin":
            known |= {item[2], item[1].after, *item[1].asked}
    return next(name for name in (f"r{i}" for i in range(1, 99)) if name not in known)


def _set(world: World, number: int, worker: Worker | None) -> World:
    row = put(world.workers, number, worker)
    # Workers are alike.
    return world._replace(workers=tuple(sorted(row, key=lambda w: (w is None, w))))


def _fault(world: World) -> World:
    return world._replace(faults=world.faults - 1)


def _queue(world: World, message: Message) -> World:
    return world._replace(queue=tuple(sorted((*world.queue, message))))
