"""What goes wrong with the broker is told with its URL, the setting and the remedy, and without passwords."""

from __future__ import annotations

import itertools
from typing import Any
from urllib.parse import quote

import pytest
import redis
from amqp.exceptions import AccessRefused, NotAllowed
from celery import Celery
from kombu.exceptions import OperationalError

from celery_leaderbeat.broker_errors import BrokerErrors
from celery_leaderbeat.clock import Clock
from celery_leaderbeat.link import Link

#: Nobody listens there.
NOWHERE = "127.0.0.1:1"


def _app(url: Any, **conf: Any) -> Celery:
    app = Celery("unit", set_as_current=False)
    app.conf.update(broker_url=url, **conf)
    return app


def _told(url: Any, times: int = 1, timeout: float = 5.0, **conf: Any) -> str:
    """Why there is no connection, at the last of so many attempts."""
    app = _app(url, **conf)
    link = Link(app, timeout, Clock())
    text = ""
    for _ in range(times):
        with pytest.raises(Exception) as raised:  # noqa: PT011  # whatever the transport raises
            link.ready()
        text = link.no_connection(raised.value)
    link.drop()
    app.close()
    return text


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CELERY_BROKER_URL", "CELERY_BROKER_WRITE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"amqp://app:hunter2@{NOWHERE}/prod", f"amqp://app:**@{NOWHERE}/prod"),
        (f"amqp://app:hunter2@{NOWHERE}//", f"amqp://app:**@{NOWHERE}//"),
        (f"amqp://app:hunter2@{NOWHERE}/a%2Fb?heartbeat=9", f"amqp://app:**@{NOWHERE}/a/b"),
        (f"amqp://app:hunt%2Fer2@{NOWHERE}/prod", f"amqp://app:**@{NOWHERE}/prod"),
        (f"amqp://app:hunter2@hunter2@{NOWHERE}/prod", f"amqp://app:**@{NOWHERE}/prod"),
        (f"amqps://app:hunter2@{NOWHERE}/prod", f"amqps://app:**@{NOWHERE}/prod"),
        (f"amqp://hunter2@{NOWHERE}/prod", f"amqp://**@{NOWHERE}/prod"),
        (f"amqp://hunter2:@{NOWHERE}/prod", f"amqp://**@{NOWHERE}/prod"),
        (f"amqp://{NOWHERE}", f"amqp://guest:**@{NOWHERE}//"),
        ("amqp://app:hunter2@[::1]:1/prod", "amqp://app:**@[::1]:1/prod"),
        (f"redis://:hunter2@{NOWHERE}/3", f"redis://:**@{NOWHERE}/3"),
    ],
)
def test_the_url_of_a_broker_that_isnt_there_is_named_without_its_password(url: str, shown: str) -> None:
    told = _told(url)
    assert told.startswith(f"no connection to the broker {shown} (broker_url): ")
    assert "refused" in told or "assign requested address" in told, "why"
    assert "hunter2" not in told


def test_the_setting_is_the_one_that_the_publisher_goes_by() -> None:
    told = _told("memory://", broker_write_url=f"amqp://app:hunter2@{NOWHERE}/prod")
    assert told.startswith(f"no connection to the broker amqp://app:**@{NOWHERE}/prod (broker_write_url): ")


def test_user_and_password_may_come_from_settings_of_their_own() -> None:
    told = _told(f"amqp://{NOWHERE}/prod", broker_user="app", broker_password="hunter2")
    assert told.startswith(f"no connection to the broker amqp://app:**@{NOWHERE}/prod (broker_url): ")


@pytest.mark.parametrize("url", [None, "amqp://", "localhost"])
def test_what_the_url_leaves_out_is_what_the_transport_takes(url: str | None) -> None:
    app = _app(url)
    named = "the broker amqp://guest:**@localhost:5672// (broker_url)"
    assert BrokerErrors(app).named(app.connection_for_write()) == named
    assert BrokerErrors(app).named(app.connection_for_write(), every=True) == named


@pytest.mark.parametrize("as_list", [True, False])
def test_of_several_brokers_each_that_was_tried_is_named_with_its_own_reason(as_list: bool) -> None:
    urls = [f"amqp://app:hunter2-{n}@127.0.0.1:{n}/prod" for n in (1, 2, 3)]
    shown = [f"amqp://app:**@127.0.0.1:{n}/prod" for n in (1, 2, 3)]
    url = urls if as_list else ";".join(urls)
    first, second = _told(url), _told(url, times=2)
    refused = "ConnectionRefusedError(111, 'Connection refused')"
    assert first == (
        f"no connection to the broker {shown[0]} (broker_url): {refused}; none to {shown[1]}: "
        "OperationalError('[Errno 111] Connection refused')"
    )
    assert second.startswith(
        f"no connection to the broker {shown[2]} (broker_url): {refused}; none to {shown[0]}"
    )
    errors = BrokerErrors(_app(url))
    connection = _app(url).connection_for_write()
    assert errors.named(connection, every=True) == f"the broker {';'.join(shown)} (broker_url)"
    assert errors.named(connection) == f"the broker {shown[0]} (broker_url)"


def test_once_there_is_a_connection_the_broker_that_it_is_to_is_named() -> None:
    app = _app([f"amqp://app:hunter2@{NOWHERE}/prod", "memory://app:hunter2@host:2/prod"])
    link = Link(app, 5.0, Clock())
    link.ready()
    assert link.broker == "the broker memory://app:**@host:2/prod (broker_url)"
    link.drop()
    app.close()


def test_sentinels_are_named_all_since_each_is_asked() -> None:
    # Asking those that aren't there takes seconds.
    url = "sentinel://:hunter2@127.0.0.1:1;sentinel://:hunter2@127.0.0.1:2"
    for text, shown in (
        (url, "sentinel://:**@127.0.0.1:1/;sentinel://:**@127.0.0.1:2/"),
        (url.partition(";")[0], "sentinel://:**@127.0.0.1:1//"),
    ):
        app = _app(text, broker_transport_options={"master_name": "m"})
        assert BrokerErrors(app).shown(app.connection_for_write()) == shown


#: As text that the password "pieces" may stand in, with the characters that have to be encoded in it.
_ODD = [
    "/",
    "?",
    "#",
    ";",
    "@",
    ":",
    "%",
    "[",
    "]",
    "//",
    "/?",
    " ",
    "\\",
    "'",
    '"',
    "&",
    "\uff20",
]


@pytest.mark.parametrize(
    "template", ["amqp://app:{}@{}/prod", "amqp://:{}@{}", "amqp://{}@{}/prod", "{}@{}", "amqp:{}@{}"]
)
def test_no_piece_of_a_password_gets_out_whatever_it_is_made_of(template: str) -> None:
    another = f"{NOWHERE};amqp://app:hidden@127.0.0.1:2"
    for odd, (one, two), address in itertools.product(
        _ODD,
        [("hunter", "hidden"), ("12345", "54321")],
        [NOWHERE, another] if "app:" in template else [NOWHERE],
    ):
        if odd == ":" and "//{}" in template:
            # Then one is the user's name.
            continue
        url = template.format(f"{one}{odd}{two}", address)
        # A number may be the address of a host that isn't there.
        told = _told(url, timeout=0.05)
        for piece in (one, two, "hidden"):
            assert piece not in told, url
        assert told.startswith("no connection to the broker ")
        assert "(broker_url): " in told


def test_of_a_url_whose_password_isnt_encoded_the_rule_is_told() -> None:
    assert _told(f"amqp://app:hunter/2@{NOWHERE}/prod") == (
        "no connection to the broker amqp://** (broker_url): ValueError: in a password, the characters / ? # ; @ : % are "
        "written as %2F %3F %23 %3B %40 %3A %25"
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nosuch://app:hunter2@host:1/prod", "nosuch://app:**@host:1/prod"),
        (f"redis://{NOWHERE}/3?password=hunter2", f"redis://{NOWHERE}/3"),
        ("sqla+nosuch://app:hunter2@host/prod", "sqla+nosuch://app:**@host/**"),
    ],
)
def test_a_url_of_which_no_connection_can_be_made_is_named_too(url: str, shown: str) -> None:
    told = _told(url)
    assert told.startswith(f"no connection to the broker {shown} (broker_url): ")
    assert "hunter2" not in told


_LOGIN = "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see the broker logfile."


@pytest.mark.parametrize(
    ("exc", "remedy"),
    [
        (AccessRefused(_LOGIN), "check the user and the password in broker_url"),
        (
            redis.exceptions.AuthenticationError("invalid username-password pair or user is disabled."),
            "check the user and the password in broker_url",
        ),
        (
            redis.exceptions.ResponseError("WRONGPASS invalid"),
            "check the user and the password in broker_url",
        ),
        (
            NotAllowed("NOT_ALLOWED - vhost prod not found"),
            "create the virtual host (rabbitmqctl add_vhost), or correct its name, the path in broker_url",
        ),
        (
            NotAllowed("NOT_ALLOWED - access to vhost 'prod' refused for user 'app'"),
            "give the user rights on the virtual host (rabbitmqctl set_permissions), or correct its name, the path in broker_url",
        ),
        (
            NotAllowed(
                "NOT_ALLOWED - access to vhost 'prod' refused for user 'app': connection limit (5) is reached"
            ),
            "",
        ),
        (ConnectionRefusedError(111, "Connection refused"), ""),
    ],
)
def test_what_can_be_done_about_it_is_told(exc: Exception, remedy: str) -> None:
    errors = BrokerErrors(_app(f"amqp://app:hunter2@{NOWHERE}/prod"))
    assert errors.why(exc) == (f"{exc!r}: {remedy}" if remedy else repr(exc))
    wrapped = OperationalError(str(exc))
    wrapped.__cause__ = exc
    assert errors.why(wrapped) == (f"{wrapped!r}: {remedy}" if remedy else repr(wrapped))


@pytest.mark.parametrize(
    "password", ["hunter2", "hun/ter", "hun'ter", 'hun"ter', "hun\\ter", "hun'\"ter", "hünter\n2"]
)
def test_what_a_broker_quotes_is_told_without_the_password_of_any(password: str) -> None:
    one, two = f"amqp://app:{quote(password, safe='')}@{NOWHERE}/prod", "amqp://app:second@127.0.0.1:2/prod"
    app = _app([one, two], broker_password="third", broker_transport_options={"password": "fourth"})
    errors, connection = BrokerErrors(app), app.connection_for_write()
    for secret in (password, quote(password, safe=""), "second", "third", "fourth"):
        for frame in ("AUTH {}", "AUTH '{}'", 'it\'s "{}"'):
            said = errors.said(ValueError(frame.format(secret)), connection)
            assert "***" in said, secret
            for form in (secret, repr(secret)[1:-1]):
                assert form not in said
