"""The settings of beat and of the workers, read from `app.conf` and validated here and nowhere else.

Everything that can be refused is refused when a process starts: a value of the wrong type, a mix of
timings in which a lease would lapse under its own leader, an option that the driver doesn't have. Names
that look like ours and aren't read are only warned about, since one configuration may serve two versions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from celery_leaderbeat._conf import Source, stray_settings
from celery_leaderbeat._redis_conf import find_redis, redis_options
from celery_leaderbeat.errors import SettingsError
from celery_leaderbeat.policy_options import validate_defaults
from celery_leaderbeat.redis_url import RedisTarget
from celery_leaderbeat.release import Release

__all__ = ["NOT_YET", "Settings", "unknown_settings"]

logger = logging.getLogger(__name__)

#: Names that are reserved for features of a later version; setting them is warned about.
NOT_YET = ("dispatch_threads", "http")

_NAMES = (
    "clock",
    "events",
    "fast_failover",
    "key_prefix",
    "lease_ttl",
    "min_replicas",
    "policy",
    "publish_timeout",
    "redis_options",
    "redis_url",
    "release",
    "renew_interval",
    "run_lease",
    "slot_retention",
    "stall_timeout",
)

#: Shortest lease, of a leader or of a run, in seconds: below it, ordinary pauses of a process would end it.
_SHORTEST_LEASE = 1.0
#: Least time for one renewal between its turn and the end of the trust in the lease, in seconds.
_ONE_RENEWAL = 0.25
#: Shortest retention, in seconds: below it, a slot's record could go before its message was looked at.
_SHORTEST_RETENTION = 60.0


#: More Redis replicas than this, nobody has: the number was meant for another setting.
_MOST_REPLICAS = 100
#: Longest sleep of beat's loop under this scheduler, in seconds.
_LONGEST_SLEEP = 1.0


@dataclass(frozen=True)
class Settings:
    """What an app has set, complete with defaults. All durations are in seconds.

    Attributes:
        redis_url: URL of the server that holds the lease and the ledger. Holds the password.
        redis: the same, taken apart.
        redis_options: more arguments for the driver's connections; they win over options in the URL.
        key_prefix: what all keys share; also their hash tag.
        app_identity: whose keys they are, to notice another app under the same prefix.
        lease_ttl: how long a lease lasts unless it is renewed.
        renew_interval: time from one renewal to the next.
        fast_failover: take over from a leader whose subscription is gone, before its lease lapses.
        stall_timeout: a tick loop that takes longer than this is no longer renewed.
        publish_timeout: longest that one publish may take, with connecting to the broker if need be.
        run_lease: how long a worker may be frozen or cut off before its run counts as dead.
        policy: the defaults for the policies of all entries.
        slot_retention: how long the record of a slot is kept at least.
        clock: `"redis"` or `"local"`: whose time decides when a slot is due.
        events: how many events are kept, about; 0 for none.
        min_replicas: how many Redis replicas must have a claim before its message is published; 0 for none.
        release: of the code and schedule that this replica runs; an empty one for none.
        origins: name -> where the value came from: `"default"`, the setting as it was spelled, or
            `"broker_url"`, `"broker_write_url"`, `"result_backend"`.
    """

    redis_url: str = field(repr=False)
    redis: RedisTarget
    redis_options: Mapping[str, Any] = field(repr=False)
    key_prefix: str
    app_identity: str
    lease_ttl: float
    renew_interval: float
    fast_failover: bool
    stall_timeout: float
    publish_timeout: float
    run_lease: float
    policy: Mapping[str, Any]
    slot_retention: float
    clock: str
    events: int
    min_replicas: int
    release: Release
    origins: Mapping[str, str] = field(repr=False)

    @property
    def margin(self) -> float:
        """Seconds by which a leader's trust in its lease ends before the lease can."""
        return self.lease_ttl / 10

    @property
    def silence(self) -> float:
        """Seconds without a sign of life from the broker after which a leader leaves the lead to another.

        Half the TTL, so that with a publish that hangs at the wrong moment another one leads within the TTL.
        """
        spare = 0.75 * (self.lease_ttl - self.publish_timeout)
        return max(min(self.lease_ttl / 2, spare), self.margin)

    @classmethod
    def from_app(cls, app: Any, warn: bool = True) -> Settings:
        """Read and validate the settings of `app`. Opens no connection.

        Names that aren't read are logged as warnings, unless `warn` is False.

        Raises:
            SettingsError: a value, or a mix of values, can't work. The message names the settings, their
                values and the rule, and never holds a password.
            PolicyError: `leaderbeat_policy` has an unknown key or an impossible value.
        """
        for message in unknown_settings(app) if warn else ():
            logger.warning("%s", message, extra={"action": "unknown_setting"})
        source = Source(app)
        redis_url, target = find_redis(source)
        lease_ttl = source.seconds("lease_ttl", 15.0)
        publish_timeout = source.seconds("publish_timeout", min(5.0, lease_ttl / 3))
        policy = source.mapping("policy")
        validate_defaults(policy, source.spelling("policy"))
        settings = cls(
            redis_url=redis_url,
            redis=target,
            redis_options=MappingProxyType(redis_options(source, target)),
            key_prefix=_key_prefix(source),
            app_identity=_identity(app),
            lease_ttl=lease_ttl,
            renew_interval=source.seconds("renew_interval", lease_ttl / 3),
            fast_failover=source.flag("fast_failover", True),
            stall_timeout=source.seconds("stall_timeout", max(lease_ttl, publish_timeout + 2)),
            publish_timeout=publish_timeout,
            run_lease=source.seconds("run_lease", 30.0),
            policy=MappingProxyType(dict(policy)),
            slot_retention=source.seconds("slot_retention", 3600.0),
            clock=source.choice("clock", ("redis", "local"), "redis"),
            events=source.count("events", 10_000),
            min_replicas=_min_replicas(source),
            release=_release(source),
            origins=MappingProxyType(source.origins),
        )
        _check_timings(settings, source)
        return settings

    def hurried(self, timeout: float) -> Settings:
        """The same for who can't wait: no answer of Redis takes longer than `timeout` seconds, whatever its options say."""
        given = {**self.redis.kwargs, **self.redis_options}
        names = ("socket_timeout",) if self.redis.unix else ("socket_timeout", "socket_connect_timeout")
        bounds = {name: min(given.get(name) or timeout, timeout) for name in names}
        return replace(self, redis_options=MappingProxyType({**self.redis_options, **bounds}))

    def banner(self) -> str:
        """Lines for the banner of `celery beat`: the effective values, and where they came from."""

        def cited(name: str) -> str:
            return f"{getattr(self, name):g}s ({self.origins[name]})"

        failover = f"{'fast' if self.fast_failover else 'by expiry'} ({self.origins['fast_failover']})"
        options = f", options {', '.join(sorted(self.redis_options))}" if self.redis_options else ""
        lines = {
            "redis": f"{self.redis.display} ({self.origins['redis_url']}){options}",
            "key prefix": f"{self.key_prefix} ({self.origins['key_prefix']})",
            "lease ttl": f"{cited('lease_ttl')}, renewed every {cited('renew_interval')}",
            "failover": failover,
            "publish timeout": f"{cited('publish_timeout')}, stall timeout {cited('stall_timeout')}",
            "slot retention": cited("slot_retention"),
            "run lease": cited("run_lease"),
            "clock": f"{self.clock} ({self.origins['clock']})",
            "events": f"{self.events} ({self.origins['events']})",
        }
        if self.min_replicas:
            lines["min replicas"] = f"{self.min_replicas} ({self.origins['min_replicas']})"
        if self.release.text:
            lines["release"] = f"{self.release} ({self.origins['release']})"
        if self.policy:
            policy = ", ".join(f"{key} {value!r}" for key, value in sorted(self.policy.items()))
            lines["policy"] = f"{policy} ({self.origins['policy']})"
        return "\n".join(f"    . leaderbeat {label} -> {value}" for label, value in lines.items())


def unknown_settings(app: Any) -> list[str]:
    """One message for each configured name that looks like a setting of ours and has no effect."""
    return stray_settings(app, _NAMES, NOT_YET)


def _identity(app: Any) -> str:
    return str(app.main or "celery")


def _key_prefix(source: Source) -> str:
    value = source.raw("key_prefix")
    if value is None:
        # Escaped so that two apps never share a prefix; the braces are those of a hash tag.
        identity = _identity(source.app).replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        return f"leaderbeat:{identity}"
    if not isinstance(value, str) or not value or value != value.strip() or not value.isprintable():
        raise source.refused("key_prefix", value, "it must be a text, not empty, of printable characters")
    if "{" in value or "}" in value:
        raise source.refused("key_prefix", value, "it can't have braces, as it is itself the keys' hash tag")
    return value


def _min_replicas(source: Source) -> int:
    value = source.count("min_replicas", 0)
    if value > _MOST_REPLICAS:
        raise source.refused(
            "min_replicas", value, f"it is a number of Redis replicas, at most {_MOST_REPLICAS}"
        )
    return value


def _release(source: Source) -> Release:
    value = source.raw("release")
    try:
        return Release.read(value)
    except ValueError as exc:
        rule = str(exc)
    raise source.refused("release", value, rule)


def _check_timings(settings: Settings, source: Source) -> None:
    def cite(name: str) -> str:
        return source.cite(name, getattr(settings, name))

    if settings.lease_ttl < _SHORTEST_LEASE:
        raise SettingsError(f"{cite('lease_ttl')} must be at least {_SHORTEST_LEASE:g} s.")
    longest = settings.lease_ttl - settings.margin - _ONE_RENEWAL
    if settings.renew_interval > longest:
        raise SettingsError(
            f"{cite('renew_interval')} must be shorter than {cite('lease_ttl')} by the margin of a tenth and "
            f"{_ONE_RENEWAL:g} s for one renewal, so at most {longest:g} s; a third is usual."
        )
    if settings.publish_timeout >= settings.lease_ttl:
        raise SettingsError(
            f"{cite('publish_timeout')} must be shorter than {cite('lease_ttl')}: a publish has to end while "
            "the lease still holds."
        )
    quiet = max(settings.publish_timeout + 0.5, _LONGEST_SLEEP)
    if settings.stall_timeout <= quiet:
        raise SettingsError(
            f"{cite('stall_timeout')} must be longer than {quiet:g} s, which is {cite('publish_timeout')} plus half "
            f"a second, and at least {_LONGEST_SLEEP:g} s (the loop's sleep): else a slow publish looks like a loop "
            "that hangs."
        )
    if settings.run_lease < _SHORTEST_LEASE:
        raise SettingsError(
            f"{cite('run_lease')} must be at least {_SHORTEST_LEASE:g} s: else ordinary pauses of a worker would look "
            "like its death."
        )
    if settings.slot_retention < _SHORTEST_RETENTION:
        raise SettingsError(f"{cite('slot_retention')} must be at least {_SHORTEST_RETENTION:g} s.")
