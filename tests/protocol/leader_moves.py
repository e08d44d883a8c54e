"""What leaders do in a world, and what must hold of the answers that they get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from tests.protocol.images import Image, Images, lease_value
from tests.protocol.world import Hand, Leader, Message, Past, Rules, World, put, require

__all__ = ["LeaderMoves"]

#: A move: what happens, whether it happens by itself if everybody goes on, and the world after it.
Move = tuple[str, bool, World]


class LeaderMoves:
    """The moves of all leaders, and of time against them."""

    def __init__(self, rules: Rules, images: Images) -> None:
        self._rules = rules
        self._ask = images.ask

    def moves(self, world: World) -> Iterator[Move]:
        yield from self._lapse(world)
        yield from self._arrive(world)
        for number, leader in enumerate(world.leaders):
            yield from self._stand(world, number, leader)
            if leader.epoch:
                yield from self._learn(world, number, leader)
                yield from self._claim(world, number, leader)
                yield from self._doubt(world, number, leader)
                yield from self._crash(world, number, leader)
                if self._rules.misses and world.faults:
                    yield from self._miss(world, number, leader)
            yield from self._go_on(world, number, leader)
            if world.faults and (leader.epoch or any(leader.hands)):
                gone = leader._replace(life=1 - leader.life, epoch=0, hands=(None,) * self._rules.slots)
                yield f"leader {number} dies", False, _fault(_set(world, number, gone))

    def _lapse(self, world: World) -> Iterator[Move]:
        if world.lease:
            orphan = all(leader.epoch != world.lease for leader in world.leaders)
            after = world._replace(lease=0, image=world.image.with_lease_over())
            yield f"the lease of epoch {_e(world.lease)} lapses", orphan, after

    def _stand(self, world: World, number: int, leader: Leader) -> Iterator[Move]:
        if leader.epoch:
            return
        # Both are alike before the first election.
        if leader.terms == self._rules.terms or (number and not world.values):
            return
        if sum(other.terms for other in world.leaders) == self._rules.elections:
            return
        holder = _holder(number, leader)
        answer, image = self._ask(world.image, "elect", holder, 0, "")
        if not world.lease:
            elected = self._elected(world, number, leader, answer, image)
            yield f"leader {number} is elected", True, elected
            if world.faults:
                lost = _set(elected, number, leader._replace(terms=leader.terms + 1))
                yield f"leader {number} is elected, and the answer is lost", False, _fault(lost)
            return
        require(answer == ("held", world.values[-1]), "A lease that is held goes to nobody else.")
        require(image == world.image, "A candidate that isn't elected writes nothing.")
        if world.values[-1] == lease_value(holder, world.lease):
            renewed, _ = self._ask(world.image, "renew", world.values[-1])
            require(renewed, "A holder whose answer was lost can renew its lease.")
            adopted = leader._replace(epoch=world.lease)
            yield f"leader {number} finds its own lease", True, _set(world, number, adopted)
            return
        for value in world.values:
            answer, image = self._ask(world.image, "elect", holder, 0, value)
            if value == world.values[-1]:
                after = self._elected(world, number, leader, answer, image)
                yield f"leader {number} takes over from epoch {_e(world.lease)}", False, after
            else:
                require(answer[0] == "held", "A takeover takes exactly the lease that it names.")
                require(image == world.image, "A candidate that isn't elected writes nothing.")

    def _elected(
        self, world: World, number: int, leader: Leader, answer: tuple[str, str], image: Image
    ) -> World:
        require(answer[0] == "elected", "A free lease, or one that is named exactly, can be taken.")
        epoch = image.epoch
        require(epoch > world.newest, "Epochs strictly increase.")
        require(
            answer[1] == lease_value(_holder(number, leader), epoch), "A lease names its holder and epoch."
        )
        leads = leader._replace(terms=leader.terms + 1, epoch=epoch)
        return _set(world, number, leads)._replace(
            image=image, lease=epoch, newest=epoch, values=(*world.values[-1:], answer[1])
        )

    def _learn(self, world: World, number: int, leader: Leader) -> Iterator[Move]:
        value = lease_value(_holder(number, leader), leader.epoch)
        renewed, image = self._ask(world.image, "renew", value)
        require(renewed == (world.lease == leader.epoch), "Only the term that leads is renewed.")
        require(image == world.image, "A renewal changes nothing but the time that is left.")
        follows = _set(world, number, leader._replace(epoch=0))
        if not renewed:
            yield f"leader {number} learns that it lost the lease", True, follows
        released, image = self._ask(world.image, "release", value)
        require(released == (world.lease == leader.epoch), "Only the term that leads is released.")
        if released:
            yield f"leader {number} releases the lease", False, follows._replace(image=image, lease=0)
        else:
            require(image == world.image, "A late release doesn't touch a newer term.")

    def _claim(self, world: World, number: int, leader: Leader) -> Iterator[Move]:
        free = [slot for slot, hand in enumerate(leader.hands) if hand is None]
        for count in range(1, len(free) + 1):
            for slots in combinations(free, count):
                if slots[0] > world.image.entry[0] + 1:
                    continue  # the slots of an entry are decided in their order
                batch = _new_batch(world, number)
                what = f"leader {number} claims {', '.join(map(str, slots))} as batch {batch}"
                meant = all(s > world.image.entry[0] or s in world.image.unfinished for s in slots)
                asked = {slot: int(world.image.field(slot, "attempt") or 1) for slot in slots}
                yield what, meant, self._claimed(world, number, leader, leader.epoch, batch, asked)
                if world.faults and meant:
                    yield from self._claim_lost(world, number, leader, batch, asked, what)
                if max(asked.values()) > 1:
                    # As a leader does that hasn't heard of the death of the run.
                    stale = dict.fromkeys(slots, 1)
                    after = self._claimed(world, number, leader, leader.epoch, batch, stale)
                    yield f"{what} as attempt 1", False, after

    def _claimed(
        self, world: World, number: int, leader: Leader, epoch: int, batch: str, slots: Mapping[int, int]
    ) -> World:
        granted, world = self._request(world, _holder(number, leader), epoch, batch, slots)
        if granted is None:
            return _set(world, number, leader._replace(epoch=0 if leader.epoch == epoch else leader.epoch))
        hands = leader.hands
        for (slot, attempt), yes in zip(slots.items(), granted, strict=True):
            hands = put(hands, slot, Hand("claimed", epoch, batch, attempt) if yes else None)
        return _set(world, number, leader._replace(hands=hands))

    def _request(
        self, world: World, holder: str, epoch: int, batch: str, slots: Mapping[int, int]
    ) -> tuple[list[bool] | None, World]:
        """Run a request for a claim of slots as attempts: which were granted, None if the lease was gone."""
        before, rules = world.image, self._rules
        args = lease_value(holder, epoch), batch, tuple(slots), tuple(slots.values())
        policy = rules.prefer, rules.on_crash, rules.max_attempts
        answers, image = self._ask(before, "claim", *args, *policy)
        if answers is None:
            require(world.lease != epoch, "A term that holds the lease can claim.")
            require(image == before, "A claim without the lease writes nothing.")
            return None, world
        require(world.lease == epoch, "No claim succeeds for a holder whose lease is gone.")
        granted = [answer == "claimed" for answer in answers]
        past = world.past
        for (slot, attempt), yes in zip(slots.items(), granted, strict=True):
            if yes:
                past = put(past, slot, self._owned(past[slot], epoch, batch, attempt))
            else:
                require(
                    image.records[slot] == before.records[slot], "A slot that isn't granted isn't touched."
                )
        return granted, world._replace(image=image, past=past)

    def _owned(self, past: Past, epoch: int, batch: str, attempt: int) -> Past:
        require(attempt == past.attempt, "An attempt that is superseded isn't claimed.")
        again = (past.owner, past.batch, past.claim) == (epoch, batch, "open") and not past.holder
        if again:
            return past
        require(not past.holder, "A slot is never claimed again once a worker has begun.")
        require(past.claim != "missed", "A slot that was missed is claimed by nobody.")
        given_back = past.claim == "given back"
        older = self._rules.prefer == "duplicate" and past.claim == "open" and past.owner < epoch
        require(
            not past.owner or given_back or older,
            "A slot is claimed once; again only if it was given back, or preferred a duplicate and was never "
            "confirmed.",
        )
        return past._replace(owner=epoch, batch=batch, claim="open")

    def _claim_lost(
        self, world: World, number: int, leader: Leader, batch: str, slots: Mapping[int, int], what: str
    ) -> Iterator[Move]:
        hands = leader.hands
        for slot, attempt in slots.items():
            hands = put(hands, slot, Hand("asked", leader.epoch, batch, attempt))
        holder = _holder(number, leader)
        waits = _fault(_set(world, number, leader._replace(hands=hands)))
        late = ("claim", holder, leader.epoch, tuple(slots.items()), batch)
        yield f"{what}, which may come late", False, _away(waits, late)
        granted, asked = self._request(world, holder, leader.epoch, batch, slots)
        if granted is not None:
            waits = _fault(_set(asked, number, leader._replace(hands=hands)))
            yield f"{what}, and the answer is lost", False, waits

    def _go_on(self, world: World, number: int, leader: Leader) -> Iterator[Move]:
        slot, hand = next(((s, hand) for s, hand in enumerate(leader.hands) if hand), (0, None))
        if hand is None:
            return  # one slot after the other is published and confirmed
        if hand.stage == "asked":
            if leader.epoch == hand.epoch:
                slots = {
                    s: other.attempt
                    for s, other in enumerate(leader.hands)
                    if other is not None and other._replace(attempt=hand.attempt) == hand
                }
                after = self._claimed(world, number, leader, hand.epoch, hand.batch, slots)
                yield f"leader {number} asks again as batch {hand.batch}", True, after
            else:
                yield f"leader {number} drops {slot}", True, self._back(world, number, leader, slot, hand)
        elif hand.stage == "claimed":
            yield from self._publish(world, number, leader, slot, hand)
        elif hand.stage == "published":
            after = self._say(world, number, leader, slot, hand, "sent")
            yield f"leader {number} confirms {slot}", True, after
        elif self._rules.prefer == "duplicate":
            after = self._back(world, number, leader, slot, hand)
            yield f"leader {number} gives {slot} back, which it may have sent", True, after
        else:
            after = self._say(world, number, leader, slot, hand, "unconfirmed")
            yield f"leader {number} doesn't know of {slot}", True, after

    def _publish(self, world: World, number: int, leader: Leader, slot: int, hand: Hand) -> Iterator[Move]:
        past = world.past[slot]
        current = hand.attempt == past.attempt
        sent = past._replace(copies=past.copies + current)
        require(
            self._rules.prefer == "duplicate" or (current and sent.copies == 1),
            "No second copy of an attempt is published for an entry that prefers a missed slot.",
        )
        leads = leader.epoch == hand.epoch
        message = Message(slot, hand.epoch, hand.attempt, "", False)
        published = leader._replace(hands=put(leader.hands, slot, hand._replace(stage="published")))
        there = _there(sent, message)
        yield (
            f"leader {number} publishes {slot} under epoch {_e(hand.epoch)}",
            leads,
            _queue(_set(world, number, published)._replace(past=put(world.past, slot, there)), message),
        )
        if world.faults:
            hangs = leader._replace(hands=put(leader.hands, slot, hand._replace(stage="unknown")))
            on_its_way = _set(world, number, hangs)._replace(past=put(world.past, slot, sent))
            yield (
                f"leader {number} publishes {slot} under epoch {_e(hand.epoch)}, and it doesn't come back",
                False,
                _fault(_away(on_its_way, ("message", message, hand.batch))),
            )
        if not leads or world.faults:
            after = self._back(world, number, leader, slot, hand)
            yield f"leader {number} gives {slot} back unsent", not leads, _fault(after) if leads else after

    def _say(self, world: World, number: int, leader: Leader, slot: int, hand: Hand, outcome: str) -> World:
        world = self._confirmed(world, slot, hand.epoch, hand.batch, outcome)
        return _set(world, number, leader._replace(hands=put(leader.hands, slot, None)))

    def _confirmed(self, world: World, slot: int, epoch: int, batch: str, outcome: str) -> World:
        past = world.past[slot]
        owns = (past.owner, past.batch) == (epoch, batch)
        answer, image = self._ask(world.image, "confirm", epoch, slot, batch, outcome)
        require((answer == "superseded") != owns, "Only the claim that owns a slot confirms it.")
        if not owns:
            require(image == world.image, "What another claim owns isn't touched.")
        elif past.claim in ("open", "doubted") or (past.claim == "given back" and outcome == "sent"):
            past = past._replace(claim="said")
        if past.holder:
            require(
                image.records[slot] == world.image.records[slot], "A slot that was begun keeps its state."
            )
        return world._replace(image=image, past=put(world.past, slot, past))

    def _back(self, world: World, number: int, leader: Leader, slot: int, hand: Hand) -> World:
        past = world.past[slot]
        answer, image = self._ask(world.image, "give_back", hand.epoch, slot, hand.batch)
        if (past.owner, past.batch) != (hand.epoch, hand.batch):
            require(answer == "superseded", "Only the claim that owns a slot gives it back.")
            require(image == world.image, "What another claim owns isn't touched.")
        elif past.holder or (past.claim in ("said", "missed") and past.arrived == hand.epoch):
            require(answer != "returned", "What was begun, or is known to be sent, isn't given back.")
        elif past.claim in ("open", "doubted"):
            past = past._replace(claim="given back")
        hands = put(leader.hands, slot, None)
        return _set(world, number, leader._replace(hands=hands))._replace(
            image=image, past=put(world.past, slot, past)
        )

    def _doubt(self, world: World, number: int, leader: Leader) -> Iterator[Move]:
        value = lease_value(_holder(number, leader), leader.epoch)
        for slot in world.image.unfinished:
            own = world.image.state(slot) == "claimed" and world.image.field(slot, "epoch") == str(
                leader.epoch
            )
            if own and leader.hands[slot] is None:
                # A request that had been given up came late: nobody will publish what it claimed.
                attempt = int(world.image.field(slot, "attempt"))
                orphan = Hand("asked", leader.epoch, world.image.field(slot, "batch"), attempt)
                after = self._back(world, number, leader, slot, orphan)
                yield f"leader {number} gives {slot} back, which it hasn't in hand", True, after
            answer, image = self._ask(world.image, "doubt", value, slot)
            if answer is None:
                require(world.lease != leader.epoch, "A term that holds the lease can doubt.")
                require(image == world.image, "A doubt without the lease writes nothing.")
                continue
            require(world.lease == leader.epoch, "Nothing is doubted for a holder whose lease is gone.")
            past = world.past[slot]
            if image.records[slot] != world.image.records[slot]:
                require(
                    self._rules.prefer == "missed"
                    and past.claim == "open"
                    and past.owner < leader.epoch
                    and not past.holder,
                    "Only an older epoch's claim that prefers a missed slot, and wasn't begun, is doubted.",
                )
                past = past._replace(claim="doubted")
            after = world._replace(image=image, past=put(world.past, slot, past))
            yield f"leader {number} looks after {slot}", True, after

    def _crash(self, world: World, number: int, leader: Leader) -> Iterator[Move]:
        """Runs whose lease is over."""
        value = lease_value(_holder(number, leader), leader.epoch)
        before = world.image
        for slot in before.unfinished:
            if before.state(slot) != "running":
                continue
            answer, image = self._ask(before, "crash", value, slot)
            if answer is None:
                require(world.lease != leader.epoch, "A term that holds the lease looks after dead runs.")
                require(image == before, "Without the lease nothing is decided about dead runs.")
                continue
            require(world.lease == leader.epoch, "No run is dead for a holder whose lease is gone.")
            past, rules = world.past[slot], self._rules
            if before.field(slot, "run_until") == "live":
                require(answer == "running" and image == before, "A run whose lease goes on isn't dead.")
            elif rules.on_crash == "rerun" and past.attempt < rules.max_attempts:
                require(answer == "returned", "A slot whose run died is run again.")
                past = Past(past.owner, claim="given back", attempt=past.attempt + 1)
            elif rules.on_crash == "auto":
                require(answer == "died", "A run that died is left to the redelivery of its message.")
            else:
                require(answer == "abandoned", "No slot has more attempts than it may have.")
                past = past._replace(abandoned=True)
            after = world._replace(image=image, past=put(world.past, slot, past))
            yield f"leader {number} finds the run of {slot}: {answer}", True, after

    def _miss(self, world: World, number: int, leader: Leader) -> Iterator[Move]:
        value = lease_value(_holder(number, leader), leader.epoch)
        for slot, record in enumerate(world.image.records):
            if slot > world.image.entry[0] + 1:
                continue
            before = world.image
            answer, image = self._ask(before, "write_off", value, slot, bool(record))
            if answer is None:
                require(world.lease != leader.epoch, "A term that holds the lease can miss slots.")
                require(image == before, "A miss without the lease writes nothing.")
                continue
            require(world.lease == leader.epoch, "Nothing is missed for a holder whose lease is gone.")
            require(image.entry[2] == before.entry[2] + answer, "Missed slots are counted as they are told.")
            past = world.past[slot]
            if answer:
                undecided = not past.owner and past.claim != "missed"
                left = past.claim == "given back" or (past.claim == "open" and past.owner < leader.epoch)
                require(
                    (undecided or left) and not past.holder,
                    "Only a slot that nobody has decided, or that an earlier leader left, is missed.",
                )
                past = past._replace(claim="missed")
            else:
                require(image == before, "A slot that is decided isn't touched by a miss.")
            after = world._replace(image=image, past=put(world.past, slot, past))
            yield f"leader {number} misses {slot}", False, _fault(after)

    def _arrive(self, world: World) -> Iterator[Move]:
        for i, item in enumerate(world.away):
            if i and item == world.away[i - 1]:
                continue
            rest = world._replace(away=world.away[:i] + world.away[i + 1 :])
            if item[0] == "message":
                _, message, batch = item
                slot, epoch = message.slot, message.epoch
                there = _there(rest.past[slot], message)
                after = _queue(rest._replace(past=put(rest.past, slot, there)), message)
                # The thread that had hung says so, if it still can.
                told = _away(after, ("confirmation", slot, epoch, batch))
                yield f"the message of {slot} under epoch {_e(epoch)} arrives late", False, told
            elif item[0] == "confirmation":
                _, slot, epoch, batch = item
                yield f"{slot} is confirmed late", False, self._confirmed(rest, slot, epoch, batch, "sent")
            elif item[0] == "claim":
                _, holder, epoch, slots, batch = item
                _, after = self._request(rest, holder, epoch, batch, dict(slots))
                yield f"the request of batch {batch} arrives late", False, after


def _holder(number: int, leader: Leader) -> str:
    return f"{number}.{leader.life}"


def _new_batch(world: World, number: int) -> str:
    """A name that no record, hand, late request or message knows."""
    known = {world.image.field(slot, "batch") for slot in range(len(world.past))}
    known |= {past.batch for past in world.past}
    known |= {hand.batch for leader in world.leaders for hand in leader.hands if hand}
    known |= {item[-1] for item in world.away if item[0] != "begin"}
    return next(name for name in (f"{number}.{i}" for i in range(9)) if name not in known)


def _there(past: Past, message: Message) -> Past:
    """A message of a leader has reached the queue."""
    if message.attempt < past.attempt:
        return past
    return past._replace(arrived=max(past.arrived, message.epoch))


def _e(epoch: int) -> int:
    return epoch % 1_000


def _set(world: World, number: int, leader: Leader) -> World:
    return world._replace(leaders=put(world.leaders, number, leader))


def _fault(world: World) -> World:
    return world._replace(faults=world.faults - 1)


def _queue(world: World, message: Message) -> World:
    return world._replace(queue=tuple(sorted((*world.queue, message))))


def _away(world: World, item: tuple[object, ...]) -> World:
    return world._replace(away=tuple(sorted((*world.away, item), key=repr)))
