"""Who gave up on the publishing thread knows what can still happen to each message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery, Task
from celery.signals import before_task_publish

from celery_leaderbeat.clock import Clock, FleetClock
from celery_leaderbeat.message import Message, Outcome
from celery_leaderbeat.publisher import Publisher
from celery_leaderbeat.tick import Stamp, tick_key
from tests.support.waits import wait_for

BROKER = "the broker memory://app:**@host/prod (broker_url)"
SLOT = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)


class _Listening:
    def __init__(self) -> None:
        self.failures: list[str] = []
        self.signs = 0

    def heard(self) -> None:
        self.signs += 1

    def failed(self, since: float, reason: str) -> None:
        self.failures.append(reason)


class _Stage:
    """An application with a broker in memory, a publisher, and a gate at which publishes wait."""

    def __init__(self) -> None:
        gate = self.gate = threading.Event()
        self.reached = reached = threading.Event()

        class Detour(Task):
            def apply_async(self, *args: Any, **options: Any) -> Any:
                reached.set()
                gate.wait(10)
                options.pop("producer")
                return super().apply_async(*args, **options)

        class Breaks(Task):
            def apply_async(self, args: Any, kwargs: Any, producer: Any, **options: Any) -> Any:
                producer.phase = "sending" if "sending" in options["task_id"] else "preparing"
                raise ConnectionResetError("gone")

        def body() -> None:
            raise AssertionError("nobody runs it")

        self.app = Celery("unit", broker="memory://app:hunter2@host/prod", set_as_current=False)
        self.app.task(name="plain", shared=False)(body)
        self.app.task(name="detour", base=Detour, shared=False)(body)
        self.app.task(name="breaks", base=Breaks, shared=False)(body)
        self.app.task(name="breaks sending", base=Breaks, shared=False)(body)
        self.app.finalize()
        self.listening = _Listening()
        self.publisher = Publisher(self.app, 0.3, FleetClock(Clock()), self.listening)

    def publish(
        self, *tasks: str, on_sent: Callable[[Message], object] = lambda message: None
    ) -> list[Message]:
        messages = [_message(f"{task}{number}", task) for number, task in enumerate(tasks)]
        settled = list(self.publisher.publish(messages, lambda: True, on_sent))
        assert sorted(m.key for m in settled) == sorted(m.key for m in messages)
        return messages

    def queued(self) -> int:
        with self.app.connection_for_write() as connection:
            channel = connection.channel()
            return channel._size("celery")


def _message(entry: str, task: str) -> Message:
    stamp = Stamp(key=tick_key(entry, SLOT), entry=entry, slot=SLOT, epoch=1, attempt=1)
    return Message(
        entry=entry,
        slot=SLOT,
        stamp=stamp,
        task=task,
        task_id=entry,
        prefer="missed",
        args=(),
        kwargs={},
        options={"headers": stamp.headers()},
    )


@pytest.fixture
def stage() -> Iterator[_Stage]:
    stage = _Stage()
    yield stage
    stage.gate.set()
    stage.publisher.abandon()
    wait_for(lambda: not stage.publisher.usable, 5, "the thread has ended")
    stage.publisher._thread.join(5)
    with stage.app.connection_for_write() as connection:
        connection.channel().queue_purge("celery")
    stage.app.close()


def _kinds(messages: list[Message]) -> list[str]:
    return [message.outcome.kind for message in messages if message.outcome is not None]


def test_what_the_broker_takes_is_sent(stage: _Stage) -> None:
    assert _kinds(stage.publish("plain", "plain")) == ["sent", "sent"]
    assert stage.queued() == 2
    assert stage.listening.signs > 0
    assert stage.listening.failures == []


def test_a_message_that_is_given_up_before_its_bytes_leave_never_leaves(stage: _Stage) -> None:
    def waits(**_: Any) -> None:
        stage.gate.wait(10)

    before_task_publish.connect(waits, sender="plain")
    try:
        assert _kinds(stage.publish("plain", "plain")) == ["unreachable", "unreachable"]
        assert stage.publisher.usable, "nothing is in doubt"
        stage.gate.set()
        assert _kinds(stage.publish("plain")) == ["sent"]
    finally:
        before_task_publish.disconnect(waits, sender="plain")
    assert stage.queued() == 1


def test_a_task_that_sends_by_its_own_means_is_in_doubt_once_it_was_asked_to(stage: _Stage) -> None:
    messages = stage.publish("detour", "plain")
    assert stage.reached.is_set()
    assert _kinds(messages) == ["unknown", "unreachable"]
    assert messages[0].outcome == Outcome("unknown", f"{BROKER} gave no answer within 0.55 s")
    assert not stage.publisher.usable


@pytest.mark.parametrize(
    ("task", "kind", "when"),
    [("breaks", "unreachable", "before"), ("breaks sending", "unknown", "during")],
)
def test_a_connection_that_breaks_is_told_with_the_broker_that_it_was_for(
    stage: _Stage, task: str, kind: Any, when: str
) -> None:
    (message,) = stage.publish(task)
    why = f"the connection to {BROKER} broke {when} the publish: ConnectionResetError('gone')"
    assert message.outcome == Outcome(kind, why)


def test_a_ledger_that_is_slow_to_take_a_confirmation_isn_t_blamed_on_the_broker(stage: _Stage) -> None:
    messages = stage.publish("plain", "plain", "plain", on_sent=lambda _: stage.gate.wait(10))
    messages += stage.publish("plain")
    assert _kinds(messages) == ["sent", "unsent", "unsent", "unsent"]
    assert messages[-1].outcome == Outcome(
        "unsent", "Redis hasn't taken the confirmation of the slot before it"
    )
    assert stage.publisher.usable
    stage.gate.set()
    assert _kinds(stage.publish("plain")) == ["sent"]
    assert stage.listening.failures == []
    assert stage.queued() == 2


class _TakenAtThatMoment:
    """The right to send a message, which the broker takes while somebody asks for the right in vain."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def take(self) -> bool:
        self._message.settle(Outcome("sent"))
        return False


def test_what_the_broker_takes_while_the_thread_is_given_up_is_sent(stage: _Stage) -> None:
    message = _message("plain", "plain")
    message.handling.take()
    message.sending = _TakenAtThatMoment(message)  # type: ignore[assignment]
    assert _kinds(list(stage.publisher._given_up([message]))) == ["sent"]
    assert stage.publisher.usable, "nothing is in doubt"


def test_of_all_that_settle_a_message_at_once_one_is_believed() -> None:
    for _ in range(50):
        message, start = _message("plain", "plain"), threading.Barrier(4)
        believed: list[Outcome] = []

        def settle(
            outcome: Outcome,
            message: Message = message,
            start: threading.Barrier = start,
            believed: list[Outcome] = believed,
        ) -> None:
            start.wait(10)
            if message.settle(outcome):
                believed.append(outcome)

        threads = [threading.Thread(target=settle, args=(Outcome("unsent", str(n)),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert believed == [message.outcome]


def test_an_abandoned_publisher_sends_nothing_more(stage: _Stage) -> None:
    stage.publisher.abandon()
    assert set(_kinds(stage.publish("plain"))) <= {"unreachable", "unsent"}
    assert stage.queued() == 0
