"""What the driver raises is told with the setting that it comes from, and what to do."""

from __future__ import annotations

import pytest
import redis
from celery import Celery

from celery_leaderbeat.driver_errors import Translator
from celery_leaderbeat.errors import StoreError, StoreUnavailable
from celery_leaderbeat.settings import Settings


def _told(exc: Exception) -> StoreError:
    app = Celery("unit", broker="memory://", set_as_current=False)
    app.conf.leaderbeat_redis_url = "redis://app:hunter2@127.0.0.1:1/0"
    translated = Translator(Settings.from_app(app), leave=lambda: None)
    with pytest.raises(StoreError) as raised, translated("a look at the lease"):
        raise exc
    return raised.value


@pytest.mark.parametrize(
    "text", ["invalid username-password pair or user is disabled.", "Authentication required."]
)
def test_a_login_that_is_refused_names_the_url_without_its_password(text: str) -> None:
    told = _told(redis.exceptions.AuthenticationError(text))
    assert isinstance(told, StoreUnavailable), "it passes once the password is right"
    assert "refused the login" in str(told)
    assert "gave no answer" not in str(told)
    _names_where(told)


@pytest.mark.parametrize(
    "exc",
    [
        redis.exceptions.NoPermissionError("this user has no permissions to run the 'get' command"),
        redis.exceptions.ResponseError(
            "ERR The user executing the script can't run this command or subcommand"
        ),
        redis.exceptions.ResponseError(
            "Error running script: -NOPERM this user has no permissions to run the 'zadd' command"
        ),
    ],
)
def test_a_command_that_is_forbidden_names_the_url_and_where_the_rules_are(exc: Exception) -> None:
    told = _told(exc)
    assert not isinstance(told, StoreUnavailable)
    assert "docs/redis.md" in str(told)
    _names_where(told)


def _names_where(told: StoreError) -> None:
    text = str(told)
    assert "127.0.0.1:1" in text
    assert "leaderbeat_redis_url" in text
    assert "hunter2" not in text
