"""What a FencedTask asks of its app."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_leaderbeat import put_off


def test_an_app_is_asked_once_for_the_kind_of_its_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def app_of(broker: str) -> Celery:
        app = Celery("kinds", broker=broker, set_as_current=False)
        connection_for_read = app.connection_for_read

        def counted() -> Any:
            asked.append(broker)
            return connection_for_read()

        monkeypatch.setattr(app, "connection_for_read", counted)
        return app

    memory, redis = app_of("memory://"), app_of("redis://nowhere")
    assert [put_off.transport_of(app) for app in (memory, redis, memory, redis)] == ["memory", "redis"] * 2
    assert asked == ["memory://", "redis://nowhere"]
