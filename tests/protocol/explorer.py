"""Explores every interleaving of two leaders and two workers over a few slots of one entry.

A world is an image of the server, what each leader and worker knows, what is in the queue and on its way, and
a short past: what the answers so far entitle everybody to believe, kept apart from the scripts' own records.
`explore` visits all worlds that the moves reach from an empty server, breadth first, so that the `Violation` it
raises has the shortest story. Two worlds that differ only in times are one.

Moves that need nothing but that everybody who lives goes on are fair; the rest (a lease that lapses under its
leader, a death, a lost answer, …) may happen or not. Where no fair move changes anything the world is at rest,
and what was promised must have come true. What nothing else bounds is limited: terms per leader, and faults.

Leaders do more here than they do in the package: they claim what they have no reason to claim, also as attempts
that are superseded, and publish whatever they have claimed however long ago, since trust in one's own lease is
local and can be wrong. Workers go on after they were taken for dead: they say how they ended, and send retries.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.protocol.images import FIRST_EPOCH, Images, empty
from tests.protocol.leader_moves import LeaderMoves
from tests.protocol.worker_moves import WorkerMoves
from tests.protocol.world import Leader, Past, Rules, Violation, World, require

__all__ = ["Found", "explore"]


@dataclass(frozen=True)
class Found:
    """How much was explored.

    Attributes:
        worlds: different ones.
        moves: from one world to another.
        at_rest: worlds in which no fair move changes anything.
        asked: how often a script was run for it; the rest was known.
    """

    worlds: int
    moves: int
    at_rest: int
    asked: int

    def __str__(self) -> str:
        return (
            f"{self.worlds} worlds ({self.at_rest} at rest), {self.moves} moves, {self.asked} runs of scripts"
        )


def explore(rules: Rules, images: Images) -> Found:
    """Visit all worlds.

    Raises:
        Violation: a guarantee doesn't hold.
    """
    leaders, workers = LeaderMoves(rules, images), WorkerMoves(rules, images)
    first = _first(rules)
    came: dict[World, tuple[World, str] | None] = {first: None}
    ahead = deque([first])
    moves = at_rest = 0
    asked = images.asked

    def story(world: World | None) -> tuple[str, ...]:
        told: list[str] = []
        while world is not None:
            step = came[world]
            world = None
            if step is not None:
                world, what = step
                told.append(what)
        return tuple(reversed(told))

    while ahead:
        world = ahead.popleft()
        resting, what = True, ""
        # Once all is done the order of leaders' and workers' moves is no matter, as no move of a leader touches
        # the record of a slot that is done, which is checked all the same.
        apart = rules.mode == "slot" and all(past.done for past in world.past)
        try:
            for source in (workers, leaders):
                follow = not apart or resting
                for what, fair, after in source.moves(world):
                    if after == world:
                        continue
                    _check_step(rules, world, after)
                    moves += 1
                    resting = resting and not fair
                    if follow and after not in came:
                        came[after] = (world, what)
                        ahead.append(after)
            if resting:
                at_rest += 1
                _check_rest(rules, world)
        except Violation as found:
            raise Violation(found.guarantee, (*story(world), f"(after {what}) {world}")) from None
    return Found(len(came), moves, at_rest, images.asked - asked)


def _first(rules: Rules) -> World:
    nobody = Leader(life=0, terms=0, epoch=0, hands=(None,) * rules.slots)
    return World(
        image=empty(rules.slots),
        leaders=(nobody, nobody),
        workers=(None,) * rules.workers,
        queue=(),
        away=(),
        lease=0,
        newest=FIRST_EPOCH,
        values=(),
        seen=0,
        past=(Past(),) * rules.slots,
        faults=rules.faults,
    )


def _check_step(rules: Rules, before: World, after: World) -> None:
    image = after.image
    if image is before.image:
        return
    require(bool(image.lease) == bool(after.lease), "The lease is there as long as somebody leads.")
    require(image.lease == (after.values[-1] if after.lease else ""), "The lease is that of the latest term.")
    require(image.entry[0] >= before.image.entry[0], "The last decided slot never moves back.")
    for slot, record in enumerate(before.image.records):
        require(
            image.state(slot) not in ("claimed", "returned") or slot in image.unfinished,
            "What is claimed or given back is on the list of what has to be looked after.",
        )
        require(bool(image.records[slot]) or not record, "A record doesn't vanish.")
        attempt = int(image.field(slot, "attempt") or 1)
        require(attempt >= int(before.image.field(slot, "attempt") or 1), "Attempts never move back.")
        require(attempt <= rules.max_attempts, "No slot has more attempts than it may have.")
        if before.past[slot].done:
            require(image.records[slot] == record, "A slot that is done stays as it is.")


def _check_rest(rules: Rules, world: World) -> None:
    """Everybody who lives has done what there was to do."""
    leads = any(leader.epoch and leader.epoch == world.lease for leader in world.leaders)
    if leads:
        require(
            not world.image.unfinished, "A leader leaves nothing on the list of what it has to look after."
        )
    for slot, past in enumerate(world.past):
        state = world.image.state(slot)
        done = past.done == 1 or (past.unheld and rules.on_crash == "auto")
        if rules.on_crash != "auto" and (past.holder or past.attempt > 1):
            _check_begun(rules, past, state, leads)
            continue
        if past.lost:
            require(past.done <= 1, "A slot is done once.")
            continue
        if rules.mode != "slot":
            arrived = past.arrived == past.owner != 0
            require(not arrived or bool(past.done) or state == "refused", "What was sent is run or refused.")
            continue
        if past.arrived == past.owner != 0:
            require(done, "What the epoch that owns a slot has sent is run to its end.")
        require(not past.owner or past.refused != past.owner or done, "Legitimate work isn't refused.")
        if not leads:
            continue
        if rules.prefer == "duplicate" and past.claim != "missed":
            require(done, "With `duplicate` every slot is done, exactly once.")
        elif not done:
            require(past.copies == 0 or past.arrived == 0, "A slot that was sent is done.")
            if slot <= world.image.entry[0]:
                require(
                    past.claim in ("doubted", "said", "missed") and state in ("unconfirmed", "missed", ""),
                    "Every slot ends in one explained state.",
                )
            else:
                require(False, "A leader decides every slot that is due.")


def _check_begun(rules: Rules, past: Past, state: str, leads: bool) -> None:
    """A slot that was begun, and whose runs the leader looks after."""
    require(past.attempt <= rules.max_attempts, "No slot has more attempts than it may have.")
    if past.done:
        require(past.done == 1 and state == "done", "A slot that is done, by one run, stays done.")
    elif past.abandoned:
        require(state == "abandoned", "A slot that is abandoned stays abandoned.")
        require(past.attempt == rules.max_attempts, "Nothing is abandoned before its last attempt.")
    elif leads:
        # The leader of a later attempt was gone before it confirmed it.
        gone = rules.prefer == "missed" and not past.holder and not past.arrived
        require(
            gone and past.claim in ("doubted", "said", "missed") and state in ("unconfirmed", "missed"),
            "As long as somebody leads, a slot that was begun is done, or abandoned.",
        )
