"""What is sent where a message is put off: a copy of it, for later, that the broker takes as a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore

from celery_leaderbeat import FencedTask
from celery_leaderbeat.put_off import put_off
from celery_leaderbeat.records import Verdict
from celery_leaderbeat.tick import Stamp, tick_key

_SLOT = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
_STAMP = Stamp(key=tick_key("job", _SLOT), entry="job", slot=_SLOT, epoch=7, put_off=4)
_DELAY = "0." * 26 + "1.1."


def _body() -> None:
    """Nothing runs it."""


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Puts a message off; the options with which it is sent."""

    def send(
        broker: str,
        seconds: float,
        headers: dict[str, Any] | None = None,
        visibility_timeout: float | None = None,
        failures: Sequence[Exception] = (),
        **delivery_info: Any,
    ) -> dict[str, Any]:
        app = Celery("later", broker=broker, set_as_current=False)
        if visibility_timeout is not None:
            app.conf.broker_transport_options = {"visibility_timeout": visibility_timeout}
        task = app.task(name="job", base=FencedTask, acks_late=True)(_body)
        sent: dict[str, Any] = {}
        failing = list(failures)

        def send_task(*args: Any, **options: Any) -> None:
            if failing:
                raise failing.pop(0)
            sent.update(options)

        monkeypatch.setattr(app, "send_task", send_task)
        task.push_request(
            id="an id",
            args=(),
            kwargs={},
            retries=2,
            headers={**_STAMP.headers(), **(headers or {})},
            delivery_info=delivery_info or {"exchange": "", "routing_key": "celery"},
            called_directly=False,
        )
        try:
            with pytest.raises(Ignore):
                put_off(task, _STAMP, Verdict("put_off", seconds=seconds))
        finally:
            task.pop_request()
        return sent

    return send


def test_it_is_the_same_message_and_says_how_often_it_was_put_off(send: Callable[..., Any]) -> None:
    sent = send("redis://nowhere", 12.5, {"mine": "kept"})
    assert (sent["task_id"], sent["retries"], sent["countdown"]) == ("an id", 2, 12.5)
    assert sent["headers"] == {**_STAMP.headers(), "mine": "kept", "leaderbeat_put_off": 5}


@pytest.mark.parametrize(("seconds", "countdown"), [(0.001, 1), (0.8, 1), (1.0, 1), (2.2, 3), (30, 30)])
def test_rabbitmq_is_asked_for_whole_seconds_and_for_one_at_least(
    send: Callable[..., Any], seconds: float, countdown: int
) -> None:
    """A quorum queue's delay is cut to whole seconds, and refused where none is left."""
    assert send("amqp://nowhere", seconds)["countdown"] == countdown


def test_redis_holds_it_for_no_longer_than_half_of_the_time_after_which_it_gives_it_to_another(
    send: Callable[..., Any],
) -> None:
    assert send("redis://nowhere", 30, visibility_timeout=1)["countdown"] == 0.5


@pytest.mark.parametrize(
    "name",
    [
        "x-death",
        *(
            f"x-{which}-death-{what}"
            for which in ("first", "last")
            for what in ("exchange", "queue", "reason")
        ),
        "x-delivery-count",
        "x-acquired-count",
    ],
)
def test_what_the_broker_has_noted_on_the_message_stays_behind(send: Callable[..., Any], name: str) -> None:
    assert name not in send("amqp://nowhere", 3, {name: 1})["headers"]


@pytest.mark.parametrize("name", ["x-mine", "x-deaths", "death", "x-delivery-counter"])
def test_what_others_have_noted_on_it_goes_along(send: Callable[..., Any], name: str) -> None:
    assert send("amqp://nowhere", 3, {name: 1})["headers"][name] == 1


@pytest.mark.parametrize("before", ["", _DELAY])
def test_its_routing_key_is_that_of_the_message_before_any_delay(
    send: Callable[..., Any], before: str
) -> None:
    sent = send("amqp://nowhere", 3, exchange="celery_delayed_delivery", routing_key=f"{before}0.1.celery")
    assert sent["routing_key"] == "0.1.celery"


def test_it_tries_again_where_the_broker_does_not_take_it_and_no_password_is_logged(
    send: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    refused = ConnectionError("no login as guest with s3cr3t")
    assert send("amqp://guest:s3cr3t@nowhere", 5.0, failures=[refused])["task_id"] == "an id"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "can't be put off (ConnectionError('no login as guest with" in warning
    assert "s3cr3t" not in caplog.text
