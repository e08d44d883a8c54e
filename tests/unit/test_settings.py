"""The settings are found in every spelling, validated at start, and never show a password."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import ssl
import subprocess
import sys
import types
from typing import Any

import pytest
import redis
from celery import Celery
from django.conf import LazySettings

from celery_leaderbeat._conf import Source
from celery_leaderbeat.errors import PolicyError, SettingsError
from celery_leaderbeat.settings import NOT_YET, Settings, unknown_settings

BROKER = "redis://broker:6379/0"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("CELERY", "LEADERBEAT", "DJANGO_SETTINGS")):
            monkeypatch.delenv(name)


def make_app(main: str | None = "proj", **conf: Any) -> Celery:
    app = Celery(main, set_as_current=False)
    app.conf.update({"broker_url": BROKER, **conf})
    return app


def settings(main: str | None = "proj", **conf: Any) -> Settings:
    return Settings.from_app(make_app(main, **conf))


def refusal(**conf: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        settings(**conf)
    assert caught.value.__context__ is None
    return str(caught.value)


def module(**names: Any) -> types.ModuleType:
    made = types.ModuleType("configuration")
    vars(made).update(names)
    return made


def test_the_defaults() -> None:
    made = settings()
    assert made.redis_url == BROKER
    assert made.redis.kwargs == {"host": "broker", "port": 6379, "db": 0}
    assert made.redis_options == {}
    assert made.key_prefix == "leaderbeat:proj"
    assert made.app_identity == "proj"
    assert (made.lease_ttl, made.renew_interval, made.stall_timeout, made.publish_timeout) == (15, 5, 15, 5)
    assert made.margin == 1.5
    assert made.fast_failover is True
    assert made.policy == {}
    assert made.slot_retention == 3600
    assert made.clock == "redis"
    assert made.events == 10_000
    origins = dict(made.origins)
    assert origins.pop("redis_url") == "broker_url"
    assert set(origins.values()) == {"default"}


def test_settings_cant_be_changed() -> None:
    made = settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.lease_ttl = 1.0  # type: ignore[misc]
    for mapping in (made.origins, made.policy, made.redis_options):
        with pytest.raises(TypeError):
            mapping["x"] = 1  # type: ignore[index]


def test_a_short_lease_shortens_what_depends_on_it() -> None:
    made = settings(leaderbeat_lease_ttl=3)
    assert (made.renew_interval, made.stall_timeout, made.publish_timeout) == (1, 3, 1)
    assert made.margin == pytest.approx(0.3)
    assert settings(leaderbeat_lease_ttl=60).publish_timeout == 5


@pytest.mark.parametrize(
    ("conf", "silence"),
    [
        ({}, 7.5),
        ({"lease_ttl": 3}, 1.5),
        ({"lease_ttl": 60}, 30),
        ({"publish_timeout": 10}, 3.75),
        ({"publish_timeout": 14.9}, 1.5),
    ],
)
def test_a_publish_that_hangs_ends_within_the_ttl_after_the_longest_silence(
    conf: dict[str, Any], silence: float
) -> None:
    made = settings(**{f"leaderbeat_{name}": value for name, value in conf.items()})
    assert made.silence == pytest.approx(silence)
    if made.publish_timeout < 14:
        assert made.silence + made.publish_timeout < made.lease_ttl


# Spellings


class Config:
    """An object as a configuration, with a member that can't be read."""

    broker_url = BROKER
    CELERY_LEADERBEAT_LEASE_TTL = 9

    @property
    def leaderbeat_policy(self) -> Any:
        raise AttributeError("not here")

    def leaderbeat_helper(self) -> None:
        """A method isn't a setting."""


def django(**names: Any) -> LazySettings:
    made = LazySettings()
    made.configure(**names)
    return made


@pytest.mark.parametrize(
    ("source", "namespace", "origin"),
    [
        (
            module(CELERY_BROKER_URL=BROKER, CELERY_LEADERBEAT_LEASE_TTL=9),
            "CELERY",
            "CELERY_LEADERBEAT_LEASE_TTL",
        ),
        (
            module(CELERY_BROKER_URL=BROKER, CELERY_LEADERBEAT_LEASE_TTL=9),
            "CELERY_",
            "CELERY_LEADERBEAT_LEASE_TTL",
        ),
        (module(CELERY_BROKER_URL=BROKER, LEADERBEAT_LEASE_TTL=9), "CELERY", "LEADERBEAT_LEASE_TTL"),
        (module(PROJ_BROKER_URL=BROKER, PROJ_LEADERBEAT_LEASE_TTL=9), "PROJ", "PROJ_LEADERBEAT_LEASE_TTL"),
        (module(proj_broker_url=BROKER, proj_leaderbeat_lease_ttl=9), "proj", "proj_leaderbeat_lease_ttl"),
        (
            django(CELERY_BROKER_URL=BROKER, CELERY_LEADERBEAT_LEASE_TTL=9),
            "CELERY",
            "CELERY_LEADERBEAT_LEASE_TTL",
        ),
        (module(broker_url=BROKER, leaderbeat_lease_ttl=9), None, "leaderbeat_lease_ttl"),
        (module(broker_url=BROKER, LEADERBEAT_LEASE_TTL=9), None, "LEADERBEAT_LEASE_TTL"),
        (module(BROKER_URL=BROKER, LEADERBEAT_LEASE_TTL=9), None, "LEADERBEAT_LEASE_TTL"),
        (module(broker_url=BROKER, CELERY_LEADERBEAT_LEASE_TTL=9), None, "CELERY_LEADERBEAT_LEASE_TTL"),
        ({"broker_url": BROKER, "leaderbeat_lease_ttl": 9, 5: "not a name"}, None, "leaderbeat_lease_ttl"),
        (type("Plain", (), {"broker_url": BROKER, "LEADERBEAT_LEASE_TTL": 9}), None, "LEADERBEAT_LEASE_TTL"),
        (Config(), None, "CELERY_LEADERBEAT_LEASE_TTL"),
    ],
)
def test_a_configuration_object_may_spell_a_setting_as_celery_does(
    source: Any, namespace: str | None, origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object(source, namespace=namespace)
    made = Settings.from_app(app)
    assert made.lease_ttl == 9
    assert made.origins["lease_ttl"] == origin
    assert not caplog.records


def test_the_app_may_be_given_a_setting_directly() -> None:
    by_keyword = Celery("proj", set_as_current=False, broker=BROKER, leaderbeat_lease_ttl=9)
    by_changes = Celery(
        "proj", set_as_current=False, changes={"broker_url": BROKER, "LEADERBEAT_LEASE_TTL": 9}
    )
    by_attribute = make_app()
    by_attribute.conf.leaderbeat_lease_ttl = 9
    by_item = make_app()
    by_item.conf["LEADERBEAT_LEASE_TTL"] = 9
    late = make_app()
    late.conf.finalize()
    late.conf.update(CELERY_LEADERBEAT_LEASE_TTL=9)
    defaults = make_app()
    defaults.add_defaults({"leaderbeat_lease_ttl": 9})
    for app in (by_keyword, by_changes, by_attribute, by_item, late, defaults):
        assert Settings.from_app(app).lease_ttl == 9


def test_a_change_to_the_app_wins_over_its_configuration_object() -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object(
        module(CELERY_BROKER_URL=BROKER, CELERY_LEADERBEAT_LEASE_TTL=9), namespace="CELERY"
    )
    app.conf.update(leaderbeat_lease_ttl=12)
    made = Settings.from_app(app)
    assert (made.lease_ttl, made.origins["lease_ttl"]) == (12, "leaderbeat_lease_ttl")


def test_another_apps_namespace_isnt_read(caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("proj", set_as_current=False)
    source = module(PROJ_BROKER_URL=BROKER, CELERY_LEADERBEAT_LEASE_TTL=9, CELERY_LEADERBEAT_LEASE_TLL=9)
    app.config_from_object(source, namespace="PROJ")
    assert Settings.from_app(app).lease_ttl == 15
    assert not caplog.records


def test_django_settings_that_are_overridden_are_seen() -> None:
    source = django(CELERY_BROKER_URL=BROKER, CELERY_LEADERBEAT_CLOCK="redis")
    app = Celery("proj", set_as_current=False)
    app.config_from_object(source, namespace="CELERY")
    assert Settings.from_app(app).clock == "redis"
    source.CELERY_LEADERBEAT_CLOCK = "local"
    assert Settings.from_app(app).clock == "local"


def test_a_configuration_object_that_lists_nothing_is_asked_by_name() -> None:
    class Dynamic:
        def __dir__(self) -> list[str]:
            return []

        def __getattr__(self, name: str) -> Any:
            known = {"CELERY_BROKER_URL": BROKER, "CELERY_LEADERBEAT_LEASE_TTL": 9}
            if name in known:
                return known[name]
            raise AttributeError(name)

    app = Celery("proj", set_as_current=False)
    app.config_from_object(Dynamic(), namespace="CELERY")
    assert Settings.from_app(app).lease_ttl == 9


def test_none_means_not_set() -> None:
    made = settings(leaderbeat_lease_ttl=None, leaderbeat_redis_url=None, leaderbeat_key_prefix=None)
    assert made.lease_ttl == 15
    assert made.redis_url == BROKER
    assert made.key_prefix == "leaderbeat:proj"
    assert made.origins["lease_ttl"] == "default"


def test_two_spellings_of_one_setting_must_agree() -> None:
    assert settings(leaderbeat_lease_ttl=9, LEADERBEAT_LEASE_TTL=9).lease_ttl == 9
    message = refusal(leaderbeat_redis_url="redis://:hunter2@a", LEADERBEAT_REDIS_URL="redis://:hunter2@b")
    assert "leaderbeat_redis_url and LEADERBEAT_REDIS_URL are one setting" in message
    assert "hunter2" not in message


# Names that aren't read


@pytest.mark.parametrize(
    ("namespace", "name", "wanted"),
    [
        (None, "leaderbeat_lease_tll", "leaderbeat_lease_ttl"),
        (None, "LEADERBEAT_LEASE_TLL", "leaderbeat_lease_ttl"),
        (None, "CELERY_LEADERBEAT_LEASETTL", "leaderbeat_lease_ttl"),
        (None, "leaderbeat_redis", "leaderbeat_redis_url"),
        (None, "leaderbeat_lease_timeout_ttl", "leaderbeat_lease_ttl"),
        (None, "leaderbaet_key_prefix", "leaderbeat_key_prefix"),
        (None, "leader_beat_key_prefix", "leaderbeat_key_prefix"),
        ("CELERY", "CELERY_LEADERBEAT_LEASE_TLL", "CELERY_LEADERBEAT_LEASE_TTL"),
        ("CELERY", "CELERY_LEADERBEET_CLOCK", "CELERY_LEADERBEAT_CLOCK"),
        ("CELERY", "LEADERBEAT_LEASE_TLL", "CELERY_LEADERBEAT_LEASE_TTL"),
        ("PROJ", "PROJ_LEADERBEAT_POLICIES", "PROJ_LEADERBEAT_POLICY"),
    ],
)
def test_a_typo_is_reported_with_the_nearest_name_and_doesnt_raise(
    namespace: str | None, name: str, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object(
        module(**{f"{namespace}_BROKER_URL" if namespace else "broker_url": BROKER, name: 9}),
        namespace=namespace,
    )
    (message,) = unknown_settings(app)
    assert message == f"{name} isn't a setting of leaderbeat; did you mean {wanted}?"
    with caplog.at_level(logging.WARNING, logger="celery_leaderbeat.settings"):
        assert Settings.from_app(app).lease_ttl == 15
    assert [(r.name, r.levelname, r.getMessage(), r.action) for r in caplog.records] == [  # type: ignore[attr-defined]
        ("celery_leaderbeat.settings", "WARNING", message, "unknown_setting")
    ]


def test_a_name_like_no_other_is_reported_with_all_that_are_read() -> None:
    (message,) = unknown_settings(make_app(leaderbeat_zzz=1))
    assert "leaderbeat_zzz isn't a setting of leaderbeat; known are leaderbeat_clock, " in message


def test_a_spelling_that_isnt_read_is_reported_with_the_one_that_is() -> None:
    (message,) = unknown_settings(make_app(Leaderbeat_lease_ttl=1))
    assert message == "Leaderbeat_lease_ttl isn't read in this spelling; write leaderbeat_lease_ttl."


@pytest.mark.parametrize("name", NOT_YET)
def test_a_setting_of_a_later_version_is_warned_about(name: str, caplog: pytest.LogCaptureFixture) -> None:
    settings(**{f"leaderbeat_{name}": 1})
    assert [record.getMessage() for record in caplog.records] == [
        f"leaderbeat_{name} isn't supported in this version and has no effect."
    ]


def test_what_only_looks_similar_isnt_reported() -> None:
    import celery_leaderbeat.errors as leaderbeat_errors

    source = module(
        broker_url=BROKER,
        LEADERBOARD_SIZE=10,
        LEADER_BEATS=1,
        celery_leaderbeat="a package",
        leaderbeat_errors=leaderbeat_errors,
        leaderbeat_helper=lambda: None,
        beat_scheduler="celery_leaderbeat:Scheduler",
    )
    app = Celery("proj", set_as_current=False)
    app.config_from_object(source)
    assert unknown_settings(app) == []


# Types


@pytest.mark.parametrize(
    ("value", "number"), [(9, 9.0), (9.5, 9.5), ("9", 9.0), (" 9.5 ", 9.5), ("15.", 15.0)]
)
def test_a_number_may_come_as_text_from_the_environment(value: Any, number: float) -> None:
    made = settings(leaderbeat_lease_ttl=value)
    assert made.lease_ttl == number
    assert isinstance(made.lease_ttl, float)


@pytest.mark.parametrize(
    "value",
    [0, -1, "0", "-5", "", "nan", "inf", "1e3x", "ten", True, False, float("nan"), float("inf"), [9], b"9"],
)
def test_what_isnt_a_number_above_zero_is_refused(value: Any) -> None:
    for name in ("lease_ttl", "renew_interval", "publish_timeout", "stall_timeout", "slot_retention"):
        message = refusal(**{f"leaderbeat_{name}": value})
        assert message == f"leaderbeat_{name} is {value!r}: it must be a number of seconds above 0."


@pytest.mark.parametrize(
    ("value", "flag"),
    [(True, True), (False, False), ("true", True), ("False", False), ("1", True), ("0", False), (0, False)],
)
def test_a_flag_may_come_as_text_from_the_environment(value: Any, flag: bool) -> None:
    assert settings(leaderbeat_fast_failover=value).fast_failover is flag


@pytest.mark.parametrize("value", ["", "maybe", 2, [], "on"])
def test_what_isnt_a_flag_is_refused(value: Any) -> None:
    assert f"leaderbeat_fast_failover is {value!r}: it must be True or False" in refusal(
        leaderbeat_fast_failover=value
    )


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (0, 0),
        (1, 1),
        (500, 500),
        ("0", 0),
        (" 500 ", 500),
        ("007", 7),
        (999_999_999, 999_999_999),
        (None, 10_000),
    ],
)
def test_a_count_is_a_whole_number_and_may_come_as_text_from_the_environment(value: Any, count: int) -> None:
    made = settings(leaderbeat_events=value)
    assert made.events == count
    assert type(made.events) is int


@pytest.mark.parametrize(
    "value",
    [
        -1,
        "-1",
        "",
        "many",
        "1e3",
        "1.0",
        1.0,
        0.5,
        True,
        False,
        [5],
        b"5",
        10**9,
        "9" * 10,
        10**30,
        "٣",
        "1_000",
    ],
)
def test_what_isnt_a_count_is_refused(value: Any) -> None:
    message = refusal(leaderbeat_events=value)
    assert message.startswith("leaderbeat_events is ")
    assert message.endswith(": it must be a whole number from 0 to 999_999_999.")


def test_a_count_is_found_and_named_in_every_spelling() -> None:
    for name in ("CELERY_LEADERBEAT_EVENTS", "LEADERBEAT_EVENTS"):
        app = Celery("proj", set_as_current=False)
        app.config_from_object(module(CELERY_BROKER_URL=BROKER, **{name: "20"}), namespace="CELERY")
        source = Source(app)
        assert source.count("events", 7) == 20
        assert source.origins == {"events": name}
        assert "rule" in str(source.refused("events", "x", "rule"))
    source = Source(make_app())
    assert source.count("events", 7) == 7
    assert source.origins == {"events": "default"}
    with pytest.raises(SettingsError, match="leaderbeat_events and LEADERBEAT_EVENTS are one setting"):
        settings(leaderbeat_events=1, LEADERBEAT_EVENTS=2)


def test_a_misspelled_events_is_reported() -> None:
    (message,) = unknown_settings(make_app(leaderbeat_event=5))
    assert message == "leaderbeat_event isn't a setting of leaderbeat; did you mean leaderbeat_events?"


def test_an_unknown_clock_is_refused_with_the_accepted_ones() -> None:
    assert settings(leaderbeat_clock="local").clock == "local"
    assert refusal(leaderbeat_clock="ntp") == "leaderbeat_clock is 'ntp': it must be 'redis' or 'local'."
    assert "must be 'redis' or 'local'" in refusal(leaderbeat_clock=["redis"])


def test_the_policy_is_validated_at_start() -> None:
    assert settings(leaderbeat_policy={"catch_up": "all"}).policy == {"catch_up": "all"}
    with pytest.raises(PolicyError, match="catchup"):
        settings(leaderbeat_policy={"catchup": "all"})
    with pytest.raises(PolicyError, match="max_attempts is 5, but on_crash is 'auto'"):
        settings(leaderbeat_policy={"max_attempts": 5})
    assert "leaderbeat_policy must be a mapping, not str" in refusal(leaderbeat_policy="all")


def test_a_wrong_policy_is_said_under_the_name_that_the_setting_has() -> None:
    app = Celery("proj", set_as_current=False)
    source = module(CELERY_BROKER_URL=BROKER, CELERY_LEADERBEAT_POLICY={"catchup": "all"})
    app.config_from_object(source, namespace="CELERY")
    with pytest.raises(PolicyError, match=r"^CELERY_LEADERBEAT_POLICY has the unknown key 'catchup'"):
        Settings.from_app(app)


# Timings


@pytest.mark.parametrize(
    ("conf", "parts"),
    [
        ({"lease_ttl": 0.5}, ["leaderbeat_lease_ttl (0.5 s)", "at least 1 s"]),
        (
            {"renew_interval": 20},
            [
                "leaderbeat_renew_interval (20 s)",
                "leaderbeat_lease_ttl (15 s, its default)",
                "at most 13.25 s",
            ],
        ),
        ({"renew_interval": 13.5}, ["leaderbeat_renew_interval (13.5 s)", "0.25 s for one renewal"]),
        ({"renew_interval": 13.3}, ["leaderbeat_renew_interval (13.3 s)", "at most 13.25 s"]),
        (
            {"renew_interval": 14, "lease_ttl": "15"},
            ["leaderbeat_renew_interval (14 s)", "leaderbeat_lease_ttl (15 s)"],
        ),
        (
            {"renew_interval": 5, "lease_ttl": 3},
            ["leaderbeat_renew_interval (5 s)", "leaderbeat_lease_ttl (3 s)"],
        ),
        (
            {"publish_timeout": 15},
            ["leaderbeat_publish_timeout (15 s)", "leaderbeat_lease_ttl (15 s, its default)"],
        ),
        (
            {"stall_timeout": 5},
            ["leaderbeat_stall_timeout (5 s)", "leaderbeat_publish_timeout (5 s, its default)"],
        ),
        (
            {"stall_timeout": 2, "publish_timeout": 3},
            ["leaderbeat_stall_timeout (2 s)", "leaderbeat_publish_timeout (3 s)"],
        ),
        ({"slot_retention": 59}, ["leaderbeat_slot_retention (59 s)", "at least 60 s"]),
    ],
)
def test_timings_out_of_order_are_refused_with_both_settings_and_values(
    conf: dict[str, Any], parts: list[str]
) -> None:
    message = refusal(**{f"leaderbeat_{name}": value for name, value in conf.items()})
    for part in parts:
        assert part in message


def test_an_error_names_the_setting_as_the_user_spelled_it() -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object(
        module(CELERY_BROKER_URL=BROKER, CELERY_LEADERBEAT_LEASE_TTL="x"), namespace="CELERY"
    )
    with pytest.raises(SettingsError, match=r"^CELERY_LEADERBEAT_LEASE_TTL is 'x'"):
        Settings.from_app(app)


@pytest.mark.parametrize(
    "conf", [{"lease_ttl": 1}, {"renew_interval": 13.25}, {"publish_timeout": 14.9}, {"slot_retention": 60}]
)
def test_timings_at_the_limit_are_accepted(conf: dict[str, Any]) -> None:
    settings(**{f"leaderbeat_{name}": value for name, value in conf.items()})


# The key prefix


@pytest.mark.parametrize(
    ("main", "prefix", "identity"),
    [
        (None, "leaderbeat:celery", "celery"),
        ("", "leaderbeat:celery", "celery"),
        ("app", "leaderbeat:app", "app"),
        ("my {app}", "leaderbeat:my %7Bapp%7D", "my {app}"),
        ("my %7Bapp%7D", "leaderbeat:my %257Bapp%257D", "my %7Bapp%7D"),
        ("Ünï", "leaderbeat:Ünï", "Ünï"),
    ],
)
def test_the_default_prefix_is_distinct_for_each_app(main: str | None, prefix: str, identity: str) -> None:
    made = settings(main)
    assert (made.key_prefix, made.app_identity) == (prefix, identity)


@pytest.mark.parametrize("prefix", ["", " a", "a ", "a\nb", "{a}", "a{", "}", 5, b"a"])
def test_a_prefix_that_cant_be_a_hash_tag_is_refused(prefix: Any) -> None:
    assert f"leaderbeat_key_prefix is {prefix!r}: it " in refusal(leaderbeat_key_prefix=prefix)


def test_a_prefix_of_ones_own() -> None:
    assert settings(leaderbeat_key_prefix="prod:*").key_prefix == "prod:*"


# Which Redis


def test_our_own_url_comes_first() -> None:
    made = settings(leaderbeat_redis_url=" valkey://own/3\n", result_backend="redis://backend")
    assert made.redis_url == "valkey://own/3"
    assert made.redis.kwargs == {"host": "own", "port": 6379, "db": 3}
    assert made.origins["redis_url"] == "leaderbeat_redis_url"


@pytest.mark.parametrize(
    ("conf", "host", "origin"),
    [
        ({"broker_url": "rediss://b", "result_backend": "redis://r"}, "b", "broker_url"),
        ({"broker_url": "valkey://b"}, "b", "broker_url"),
        ({"broker_url": ["redis://b"]}, "b", "broker_url"),
        ({"broker_url": "amqp://mq", "broker_write_url": "redis://w"}, "w", "broker_write_url"),
        ({"broker_url": "amqp://mq", "result_backend": "redis://r"}, "r", "result_backend"),
        ({"broker_url": None, "result_backend": "redis://r"}, "r", "result_backend"),
    ],
)
def test_else_the_broker_and_else_the_result_backend_is_used(
    conf: dict[str, Any], host: str, origin: str
) -> None:
    made = settings(**conf)
    assert made.redis.kwargs["host"] == host
    assert made.origins["redis_url"] == origin


def test_the_broker_of_the_environment_and_of_the_command_line_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://env")
    assert settings().redis.kwargs["host"] == "env"
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://env")
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://results")
    assert settings().redis.kwargs["host"] == "results"


@pytest.mark.parametrize(
    ("broker", "backend"),
    [("amqp://u:hunter2@mq", "db+postgresql://u:hunter2@pg/x"), (None, None), ("memory://", "redis")],
)
def test_without_any_redis_the_error_says_what_to_set(broker: Any, backend: Any) -> None:
    message = refusal(broker_url=broker, result_backend=backend)
    assert "Set leaderbeat_redis_url = 'redis://host:6379/0'" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("broker", "rule"),
    [
        ("sentinel://:hunter2@a:26379;sentinel://b:x", "host and port"),
        ("redis://:hunter2@a/0;redis://:hunter2@b/0", "name one server"),
        (["redis://:hunter2@a/0", "redis://:hunter2@b/0"], "name one server"),
        ("redis://:hunter2@a:x", "host and port"),
    ],
)
def test_a_redis_broker_that_cant_be_used_is_not_passed_over(broker: Any, rule: str) -> None:
    message = refusal(broker_url=broker, result_backend="redis://backend")
    assert message.startswith("broker_url (")
    assert rule in message
    assert "leaderbeat_redis_url" in message
    assert "hunter2" not in message


SENTINELS = "sentinel://:hunter2@a;sentinel://b:1/2"


@pytest.mark.parametrize("setting", ["broker", "result_backend", "own"])
def test_the_primary_s_name_and_the_way_into_the_sentinels_are_found_where_celery_has_them(
    setting: str,
) -> None:
    options = {
        "master_name": "mymaster",
        "sentinel_kwargs": {"password": "hunter2-s", "ssl": True, "ssl_cert_reqs": ssl.CERT_NONE},
        "visibility_timeout": 5,
    }
    if setting == "own":
        del options["visibility_timeout"]
        made = settings(
            leaderbeat_redis_url=SENTINELS, leaderbeat_redis_options={**options, "client_name": "x"}
        )
        assert made.redis_options == {"client_name": "x"}
    elif setting == "broker":
        options["sentinel_kwargs"]["retry_on_timeout"] = True
        made = settings(broker_url=SENTINELS, broker_transport_options=options)
    else:
        made = settings(
            broker_url="amqp://", result_backend=SENTINELS, result_backend_transport_options=options
        )
    target = made.redis
    assert (target.kind, target.master_name, target.nodes) == (
        "sentinel",
        "mymaster",
        (("a", 26379), ("b", 1)),
    )
    assert target.kwargs == {"db": 2, "password": "hunter2"}
    assert target.sentinel_tls
    assert target.sentinel == {"password": "hunter2-s", "ssl_cert_reqs": "none", "ssl_check_hostname": False}
    assert "sentinel://:**@a:26379;b:1/2 (the primary 'mymaster')" in made.banner()
    assert "hunter2" not in repr(made) + made.banner()


def test_our_own_options_come_before_the_broker_s() -> None:
    made = settings(
        broker_url=SENTINELS,
        broker_transport_options={"master_name": "one", "sentinel_kwargs": {"password": "x"}},
        leaderbeat_redis_options={"master_name": "two"},
    )
    assert (made.redis.master_name, made.redis.sentinel) == ("two", {"password": "x"})


def test_with_tls_for_all_the_sentinels_are_verified_as_the_servers_are() -> None:
    url = "rediss+sentinel://a?ssl_ca_certs=/ca.pem"
    made = settings(leaderbeat_redis_url=url, leaderbeat_redis_options={"master_name": "m"})
    assert made.redis.sentinel == {
        "ssl_ca_certs": "/ca.pem",
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
    }
    plain = {"master_name": "m", "sentinel_kwargs": {"ssl": False}}
    assert not settings(leaderbeat_redis_url=url, leaderbeat_redis_options=plain).redis.sentinel_tls


@pytest.mark.parametrize("query", ["", "?ssl_cert_reqs=none", "?ssl_ca_certs=/other.pem"])
def test_options_of_tls_beside_the_url_are_for_the_sentinels_too(query: str) -> None:
    tls = {"ssl_ca_certs": "/ca.pem", "ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_password": "hunter2"}
    made = settings(
        leaderbeat_redis_url=f"rediss+sentinel://a{query}",
        leaderbeat_redis_options={"master_name": "m", "client_name": "x", **tls},
    )
    wanted = {**tls, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
    assert made.redis.sentinel == wanted
    assert made.redis.kwargs | made.redis_options == {"db": 0, "client_name": "x", **wanted}
    assert "hunter2" not in repr(made) + made.banner()
    # With options of their own, the Sentinels have no others.
    own = {"master_name": "m", "sentinel_kwargs": {"ssl_ca_path": "/cas"}, **tls}
    made = settings(leaderbeat_redis_url=f"rediss+sentinel://a{query}", leaderbeat_redis_options=own)
    assert made.redis.sentinel == {
        "ssl_ca_path": "/cas",
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
    }


def test_who_verifies_nothing_compares_no_names_and_who_verifies_compares_them() -> None:
    def both(query: str, **options: Any) -> tuple[Any, Any]:
        made = settings(leaderbeat_redis_url=f"rediss://own?{query}", leaderbeat_redis_options=options)
        merged = {**made.redis.kwargs, **made.redis_options}
        return merged["ssl_cert_reqs"], merged["ssl_check_hostname"]

    assert both("") == ("required", True)
    assert both("ssl_cert_reqs=none", ssl_cert_reqs="required") == ("required", True)
    assert both("ssl_cert_reqs=none", ssl_cert_reqs="required", ssl_check_hostname=False) == (
        "required",
        False,
    )
    assert both("ssl_check_hostname=false", ssl_cert_reqs="required") == ("required", False)
    assert both("ssl_check_hostname=true", ssl_cert_reqs="none") == ("none", False)


@pytest.mark.parametrize(
    ("conf", "rule"),
    [
        (
            {"broker_url": SENTINELS},
            "Set broker_transport_options = {'master_name': 'mymaster'}",
        ),
        (
            {"leaderbeat_redis_url": SENTINELS},
            "Set leaderbeat_redis_options = {'master_name': 'mymaster'}",
        ),
        (
            {"broker_url": SENTINELS, "broker_transport_options": {"master_name": ""}},
            "asked for a primary by its name",
        ),
        (
            {
                "leaderbeat_redis_url": SENTINELS,
                "leaderbeat_redis_options": {"master_name": "m", "sentinel_kwargs": {"passwort": "hunter2"}},
            },
            "sentinel_kwargs has the unknown key 'passwort'; did you mean password?",
        ),
        (
            {
                "leaderbeat_redis_url": SENTINELS,
                "leaderbeat_redis_options": {"master_name": "m", "sentinel_kwargs": "hunter2"},
            },
            "sentinel_kwargs must be a mapping, not str",
        ),
        (
            {
                "leaderbeat_redis_url": SENTINELS,
                "leaderbeat_redis_options": {
                    "master_name": "m",
                    "sentinel_kwargs": {"ssl_password": "hunter2", "ssl_ca_certs": "/ca.pem"},
                },
            },
            "sentinel_kwargs has the key 'ssl_ca_certs', but the Sentinels are without TLS. Add 'ssl': True",
        ),
        (
            {"leaderbeat_redis_options": {"master_name": "m"}},
            "'master_name', but redis://broker:6379/0 has no Sentinels",
        ),
        (
            {
                "leaderbeat_redis_url": "redis+cluster://a",
                "leaderbeat_redis_options": {"sentinel_kwargs": {}},
            },
            "has no Sentinels",
        ),
    ],
)
def test_sentinels_that_cant_be_asked_are_refused_at_start(conf: dict[str, Any], rule: str) -> None:
    message = refusal(**conf)
    assert rule in message
    assert "hunter2" not in message


@pytest.mark.parametrize("value", [-1, 101, "two", 1.5, True])
def test_a_number_of_replicas_that_cant_be_is_refused(value: Any) -> None:
    message = refusal(leaderbeat_min_replicas=value)
    assert message.startswith(f"leaderbeat_min_replicas is {value!r}: it ")


def test_the_number_of_replicas_is_shown_where_it_is_set() -> None:
    assert settings().min_replicas == 0
    assert "replicas" not in settings().banner()
    made = settings(leaderbeat_min_replicas="2")
    assert made.min_replicas == 2
    assert "    . leaderbeat min replicas -> 2 (leaderbeat_min_replicas)" in made.banner().splitlines()


def test_credentials_in_settings_of_their_own_are_used_as_celery_does() -> None:
    broker = settings(broker_url="redis://b", broker_user="u", broker_password="p", broker_port=7000)
    assert broker.redis.kwargs == {"host": "b", "port": 7000, "db": 0, "username": "u", "password": "p"}
    backend = settings(
        broker_url="amqp://mq",
        result_backend="redis://",
        redis_host="r",
        redis_username="u",
        redis_password="p",
    )
    assert backend.redis.kwargs == {"host": "r", "port": 6379, "db": 0, "username": "u", "password": "p"}
    own = settings(leaderbeat_redis_url="redis://own", broker_password="p", redis_password="p")
    assert "password" not in own.redis.kwargs


def test_the_tls_options_of_the_connection_that_is_used_are_used() -> None:
    options = {"ssl_cert_reqs": ssl.CERT_NONE, "ssl_ca_certs": "/ca.pem", "ssl_keyfile": None}
    for scheme in ("redis", "rediss"):
        broker = settings(broker_url=f"{scheme}://b", broker_use_ssl=options)
        assert broker.redis.tls
        assert broker.redis.kwargs["ssl_cert_reqs"] == "none"
        assert broker.redis.kwargs["ssl_ca_certs"] == "/ca.pem"
        assert "ssl_keyfile" not in broker.redis.kwargs
    backend = settings(
        broker_url="amqp://",
        broker_use_ssl={"x": 1},
        result_backend="rediss://r",
        redis_backend_use_ssl=options,
    )
    assert backend.redis.kwargs["ssl_cert_reqs"] == "none"
    own = settings(leaderbeat_redis_url="redis://own", broker_use_ssl=options)
    assert not own.redis.tls


def test_bad_tls_options_of_celery_are_refused_with_the_nearest_name() -> None:
    message = refusal(broker_url="rediss://b", broker_use_ssl={"cert_reqs": ssl.CERT_NONE})
    assert "broker_use_ssl has the unknown key 'cert_reqs'; did you mean ssl_cert_reqs?" in message
    assert "ssl_cert_reqs takes none" in refusal(broker_url="rediss://b", broker_use_ssl={"ssl_cert_reqs": 7})


def test_broker_use_ssl_as_a_flag_leaves_tls_to_the_scheme(caplog: pytest.LogCaptureFixture) -> None:
    assert not settings(broker_url="redis://b", broker_use_ssl=True).redis.tls
    assert settings(broker_url="rediss://b", broker_use_ssl=True).redis.tls
    assert all("broker_use_ssl has no effect with Redis" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2


def test_transport_options_of_celery_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    options = {"visibility_timeout": 5, "global_keyprefix": "x:", "max_retries": 3, "socket_timeout": 0.1}
    made = settings(broker_transport_options=options, result_backend_transport_options=options)
    assert made == settings()
    assert not caplog.records


# The driver's options


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (
            "redis://own",
            {"socket_timeout": 2, "socket_keepalive": True, "max_connections": 5, "client_name": "x"},
        ),
        ("redis://own", {"username": "u", "password": "p", "health_check_interval": 10}),
        ("rediss://own", {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False}),
        ("unix:///r.sock", {"socket_timeout": 2}),
    ],
)
def test_the_options_that_the_driver_takes_are_accepted(url: str, options: dict[str, Any]) -> None:
    made = settings(leaderbeat_redis_url=url, leaderbeat_redis_options=options)
    assert made.redis_options == options
    assert f"options {', '.join(sorted(options))}" in made.banner()


@pytest.mark.parametrize(
    ("url", "options", "rule"),
    [
        ("redis://own", {"socket_timout": 2}, "unknown key 'socket_timout'; did you mean socket_timeout?"),
        ("redis://own", {"visibility_timeout": 2}, "unknown key 'visibility_timeout'"),
        ("redis://own", {"global_keyprefix": "x"}, "unknown key 'global_keyprefix'"),
        ("redis://own", {"host": "x"}, "'host', which belongs into leaderbeat_redis_url"),
        ("redis://own", {"db": 1}, "'db', which belongs into leaderbeat_redis_url"),
        ("redis://own", {"decode_responses": False}, "'decode_responses', which leaderbeat sets itself"),
        ("redis://own", {"ssl_cert_reqs": "none"}, "without TLS"),
        ("rediss://own", {"ssl_cert_regs": "none"}, "did you mean ssl_cert_reqs?"),
        ("rediss://own", {"ssl_cert_reqs": "maybe"}, "ssl_cert_reqs takes none"),
        ("unix:///r.sock", {"socket_keepalive": True}, "unknown key 'socket_keepalive'"),
        ("redis://:hunter2@own", {"credential_provider": object()}, "leave one out"),
        ("redis://own", "socket_timeout=2", "must be a mapping, not str"),
        ("redis://own", {5: 2}, "keys must be texts"),
    ],
)
def test_an_option_that_the_driver_doesnt_take_is_named(url: str, options: Any, rule: str) -> None:
    message = refusal(leaderbeat_redis_url=url, leaderbeat_redis_options=options)
    assert message.startswith("leaderbeat_redis_options")
    assert rule in message
    assert "hunter2" not in message


def test_an_option_of_the_url_that_the_installed_driver_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Older:
        def __init__(
            self, host: str, port: int, db: int, ssl_cert_reqs: str, ssl_check_hostname: bool
        ) -> None:
            """Takes what an older release took."""

    monkeypatch.setattr(redis, "SSLConnection", Older)
    settings(leaderbeat_redis_url="rediss://own")
    message = refusal(leaderbeat_redis_url="rediss://own?ssl_min_version=TLSv1_2")
    assert "leaderbeat_redis_url (rediss://own:6379/0)" in message
    assert f"redis-py {redis.__version__} has no option ssl_min_version" in message


@pytest.mark.parametrize("value", [ssl.CERT_NONE, "CERT_NONE", "ssl.CERT_NONE", "none", 0, None])
def test_unverified_tls_may_be_asked_for_in_any_spelling(value: Any) -> None:
    made = settings(leaderbeat_redis_url="rediss://own", leaderbeat_redis_options={"ssl_cert_reqs": value})
    merged = made.redis.kwargs | made.redis_options
    assert (merged["ssl_cert_reqs"], merged["ssl_check_hostname"]) == ("none", False)
    redis.ConnectionPool(connection_class=redis.SSLConnection, **merged).make_connection()


def test_a_credential_provider_stands_in_for_user_name_and_password() -> None:
    provider = redis.UsernamePasswordCredentialProvider("u", "hunter2")
    made = settings(
        leaderbeat_redis_url="redis://own", leaderbeat_redis_options={"credential_provider": provider}
    )
    assert made.redis_options == {"credential_provider": provider}
    message = refusal(
        broker_url="amqp://", result_backend="redis://r", redis_backend_credential_provider=provider
    )
    assert "leaderbeat_redis_options = {'credential_provider'" in message


# What is shown


def test_the_banner_shows_effective_values_and_where_they_came_from() -> None:
    app = Celery("proj", set_as_current=False)
    source = module(
        CELERY_BROKER_URL="redis://app:hunter2@localhost/0",
        CELERY_LEADERBEAT_LEASE_TTL="9",
        CELERY_LEADERBEAT_FAST_FAILOVER=False,
    )
    app.config_from_object(source, namespace="CELERY")
    assert Settings.from_app(app).banner().splitlines() == [
        "    . leaderbeat redis -> redis://app:**@localhost:6379/0 (broker_url)",
        "    . leaderbeat key prefix -> leaderbeat:proj (default)",
        "    . leaderbeat lease ttl -> 9s (CELERY_LEADERBEAT_LEASE_TTL), renewed every 3s (default)",
        "    . leaderbeat failover -> by expiry (CELERY_LEADERBEAT_FAST_FAILOVER)",
        "    . leaderbeat publish timeout -> 3s (default), stall timeout 9s (default)",
        "    . leaderbeat slot retention -> 3600s (default)",
        "    . leaderbeat run lease -> 30s (default)",
        "    . leaderbeat clock -> redis (default)",
        "    . leaderbeat events -> 10000 (default)",
    ]
    more = (
        settings(leaderbeat_events=0, leaderbeat_policy={"overlap": "skip", "jitter": 5})
        .banner()
        .splitlines()
    )
    assert more[-2:] == [
        "    . leaderbeat events -> 0 (leaderbeat_events)",
        "    . leaderbeat policy -> jitter 5, overlap 'skip' (leaderbeat_policy)",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@cache",
        "redis://app:hunter2@cache:6379/1",
        "redis://app:hunter2@cache:x",
        "redis://app:hunter2@cache/x",
        "redis://:hunter2",
        "redis://hunter2@cache",
        "redis://cache?password=hunter2",
        "redis://cache?password=hunter2&db=x",
        "redis://cache?passwort=hunter2",
        "rediss://cache?ssl_password=hunter2",
        "rediss://app:hunter2@cache?ssl_cert_reqs=no",
        "unix:///r.sock?password=hunter2",
        "redis+socket://app:hunter2@/r.sock?virtual_host=1",
        "sentinel://:hunter2@a;sentinel://:hunter2@b",
        "redis://:hunter2@a;redis://:hunter2@b",
        "redis://:/hunter2@a",
        "http://:hunter2@cache",
    ],
)
@pytest.mark.parametrize("setting", ["leaderbeat_redis_url", "broker_url", "result_backend"])
def test_no_password_gets_out_of_the_settings(
    url: str, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    conf = {"broker_url": "amqp://", "leaderbeat_redis_options": {"client_name": "hunter2"}, setting: url}
    try:
        made = settings(**conf)
    except SettingsError as error:
        assert error.__context__ is None  # noqa: PT017 - whether it is refused depends on the URL
        texts = [str(error), repr(error)]
    else:
        texts = [repr(made), str(made), made.banner(), repr(made.redis), str(made.origins)]
    for text in (*texts, caplog.text):
        assert "hunter2" not in text


def test_no_password_gets_out_when_it_is_put_into_the_wrong_setting() -> None:
    for name in ("lease_ttl", "fast_failover", "clock", "redis_options", "policy"):
        assert "hunter2" not in refusal(**{f"leaderbeat_{name}": "redis://:hunter2@cache"})


def test_beat_and_workers_read_the_same_without_a_connection() -> None:
    # In a process of its own, so that nothing that was imported or connected before plays a part.
    code = """if True:
        import json, socket
        def refuse(*args, **kwargs): raise SystemExit("a connection was opened")
        socket.socket.connect = refuse
        from django.conf import settings
        settings.configure(CELERY_BROKER_URL="redis://cache", CELERY_LEADERBEAT_LEASE_TTL="9")
        from celery import Celery
        from celery_leaderbeat.settings import Settings
        app = Celery("proj")
        app.config_from_object("django.conf:settings", namespace="CELERY")
        made = Settings.from_app(app)
        print(json.dumps([made.lease_ttl, made.origins["lease_ttl"], made.redis.display]))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [9.0, "CELERY_LEADERBEAT_LEASE_TTL", "redis://cache:6379/0"]


# The release


@pytest.mark.parametrize(("value", "text"), [(42, "42"), (" v1.10 ", "v1.10"), ("2026-11-30T14:05Z",) * 2])
def test_a_release_is_read_and_shown(value: Any, text: str) -> None:
    made = settings(leaderbeat_release=value)
    assert made.release.text == text
    assert f"    . leaderbeat release -> {text} (leaderbeat_release)" in made.banner().splitlines()


def test_without_a_release_there_is_none_to_show() -> None:
    assert settings().release.rank == ""
    assert "release" not in settings().banner()


@pytest.mark.parametrize("value", ["deadbeef", "1.2.0rc1", 1.5, True, ["1"], ""])
def test_a_release_without_an_order_is_refused(value: Any) -> None:
    message = refusal(leaderbeat_release=value)
    assert message.startswith(f"leaderbeat_release is {value!r}: it must be something that has an order")
