"""A ledger behind Sentinels: found by its name, and found again after a failover."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.certificates import KEY_PASSWORD, Certificates
from tests.support.scene import LEADERBEAT, Scene, keys_of, leader
from tests.support.servers import RedisServer, require
from tests.support.topologies import Sentinels, start_sentinels
from tests.support.waits import wait_for

pytestmark = pytest.mark.matrix("valkey")

#: The machine may be busy with others.
PATIENCE = 40.0
SCHEDULE = {"tick": {"task": "project.fenced", "every": 1.0}}
PASSWORD, SENTINEL_PASSWORD = "s3cret-data", "s3cret-sentinel"

StartSentinels = Callable[..., Sentinels]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartSentinels]:
    """A function that starts a primary, a replica and Sentinels with passwords: `start("valkey", count=2)`."""
    started: list[Sentinels] = []

    def begin(name: str = "valkey", count: int = 1, **more: Any) -> Sentinels:
        group = start_sentinels(
            require(name),
            tmp_path / "group",
            count=count,
            password=PASSWORD,
            sentinel_password=SENTINEL_PASSWORD,
            **more,
        )
        started.append(group)
        return group

    yield begin
    for group in started:
        group.stop()


def conf(group: Sentinels, **more: Any) -> dict[str, Any]:
    """The settings with which beats and workers find the ledger."""
    options = {"master_name": group.service, "sentinel_kwargs": {"password": SENTINEL_PASSWORD}}
    return {"leaderbeat_redis_url": group.url(), "leaderbeat_redis_options": options, **more}


def lease(scene: Scene, server: RedisServer) -> Any:
    value = server.client().get(scene.key("lease"))
    return json.loads(value) if value else None


def check(scene: Scene, beats: list[Any]) -> None:
    """No slot twice, rising epochs, no password in a log."""
    sent = scene.beat_publishes()
    assert len(set(keys_of(sent))) == len(sent), "no slot twice"
    epochs = [publish.epoch for publish in sent]
    assert epochs == sorted(epochs)
    for beat in beats:
        assert beat.status == "running"
        assert not beat.find("Traceback")
        for secret in (PASSWORD, SENTINEL_PASSWORD, KEY_PASSWORD):
            assert secret not in beat.text()


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.parametrize(("kind", "by"), [("valkey", "death"), ("redis62", "order")])
def test_after_a_failover_one_replica_leads_on_and_no_slot_is_sent_twice(
    scene: Scene, start: StartSentinels, kind: str, by: str
) -> None:
    group = start(kind, count=2)
    beats = [scene.start_beat(conf=conf(group)) for _ in range(2)]
    scene.start_worker(conf=conf(group))
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run")
    before = lease(scene, group.primary)["epoch"]
    # A Sentinel that is gone is passed over.
    group.sentinels[1].freeze()
    group.sentinels[0].client().execute_command("SENTINEL", "SET", group.service, "quorum", "1")
    group.sentinels[1].thaw()
    sent = len(scene.publishes())
    group.fail_over(by_death=by == "death")
    wait_for(lambda: len(scene.publishes()) >= sent + 3, PATIENCE, "the sequence goes on")
    wait_for(lambda: len(scene.runs("end")) >= sent + 2, PATIENCE, "and so do the workers")
    after = wait_for(lambda: lease(scene, group.replica), PATIENCE, "a leader")
    assert after["epoch"] >= before
    assert after["pid"] in [beat.pid for beat in beats]
    check(scene, beats)


@pytest.mark.schedule(SCHEDULE)
def test_the_broker_s_sentinels_are_the_ledger_s_too_unless_told_otherwise(
    scene: Scene, start: StartSentinels
) -> None:
    group = start()
    transport = {"master_name": group.service, "sentinel_kwargs": {"password": SENTINEL_PASSWORD}}
    settings = {"leaderbeat_redis_url": None, "broker_transport_options": transport}
    env = {"CELERY_BROKER_URL": group.url(1)}
    beat = scene.start_beat(conf=settings, env=env)
    scene.start_worker(conf=settings, env=env)
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run")
    assert group.primary.client(1).exists(scene.key("lease"))
    assert beat.find("(the primary 'leaderbeat') (broker_url)")
    check(scene, [beat])


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.parametrize("plain_sentinels", [False, True], ids=["tls-sentinels", "plain-sentinels"])
def test_a_failover_over_tls_is_followed_and_no_password_is_shown(
    scene: Scene, start: StartSentinels, certificates: Certificates, plain_sentinels: bool
) -> None:
    group = start("redis", certificates=certificates, plain_sentinels=plain_sentinels)
    tls = certificates.driver_options()
    login: dict[str, Any] = {"password": SENTINEL_PASSWORD, **({"ssl": False} if plain_sentinels else {})}
    options = {"master_name": group.service, "sentinel_kwargs": login, **tls}
    settings = conf(group, leaderbeat_redis_options=options)
    settings["leaderbeat_redis_url"] = group.url(scheme="rediss+sentinel")
    beats = [scene.start_beat(conf=settings, loglevel="DEBUG", wait=False) for _ in range(2)]
    worker = scene.start_worker(conf=settings, loglevel="DEBUG", wait=False)
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run")
    before, sent = lease(scene, group.primary)["epoch"], len(scene.publishes())
    group.fail_over(by_death=not plain_sentinels)
    wait_for(lambda: len(scene.publishes()) >= sent + 2, PATIENCE, "the sequence goes on")
    wait_for(lambda: len(scene.runs("end")) >= sent + 2, PATIENCE, "and so do the workers")
    after = wait_for(lambda: lease(scene, group.replica), PATIENCE, "a leader")
    assert after["epoch"] >= before
    assert after["pid"] in [beat.pid for beat in beats]
    status, said = beats[0].exec_run([*LEADERBEAT, "status"])
    assert status == 0
    assert not [secret for secret in (PASSWORD, SENTINEL_PASSWORD, KEY_PASSWORD) if secret in said.decode()]
    check(scene, [*beats, worker])


@pytest.mark.schedule(SCHEDULE)
def test_celery_s_own_settings_of_tls_and_sentinels_serve_the_broker_and_the_ledger(
    scene: Scene, start: StartSentinels, certificates: Certificates
) -> None:
    group = start("redis", certificates=certificates)
    tls = certificates.driver_options()
    login = {"password": SENTINEL_PASSWORD, "ssl": True, **tls}
    settings = {
        "leaderbeat_redis_url": None,
        "broker_use_ssl": {**tls, "ssl_cert_reqs": "required"},
        "broker_transport_options": {"master_name": group.service, "sentinel_kwargs": login},
    }
    env = {"CELERY_BROKER_URL": group.url(1)}
    beat = scene.start_beat(conf=settings, env=env)
    scene.start_worker(conf=settings, env=env)
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run")
    assert group.primary.client(1).exists(scene.key("lease"))
    check(scene, [beat])


@pytest.mark.schedule(SCHEDULE)
def test_a_name_that_the_sentinels_dont_know_is_said_and_waited_for(
    scene: Scene, start: StartSentinels
) -> None:
    group = start()
    options = {"master_name": "other", "sentinel_kwargs": {"password": SENTINEL_PASSWORD}}
    beat = scene.start_beat(conf=conf(group, leaderbeat_redis_options=options))
    beat.wait_for_log("no Sentinel knows the primary 'other'", PATIENCE)
    wrong = conf(group, leaderbeat_redis_options={"master_name": group.service})
    unknown = scene.start_beat(conf=wrong)
    unknown.wait_for_log(re.compile("already authenticated|Authentication required"), PATIENCE)
    check(scene, [beat, unknown])
    assert isinstance(group.primary.client().dbsize(), int)
    assert group.primary.client().keys("*") == []


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.parametrize("kind", ["valkey", "redis62"])
def test_a_url_of_a_read_only_replica_is_said_with_the_remedy(
    scene: Scene, start: StartSentinels, kind: str
) -> None:
    group = start(kind)
    url = f"redis://:{PASSWORD}@127.0.0.1:{group.replica.port}/0"
    beat = scene.start_beat(conf={"leaderbeat_redis_url": url})
    for line in (
        beat.wait_for_log("this replica of beat can stand by, but never lead", PATIENCE),
        beat.wait_for_log("No election: ", PATIENCE),
    ):
        assert f"127.0.0.1:{group.replica.port}/0 (leaderbeat_redis_url) is a read-only replica" in line.text
        assert "et leaderbeat_redis_url to the primary" in line.text
    with pytest.raises(redis.exceptions.ReadOnlyError):
        group.replica.client().set("x", "1")
    check(scene, [beat])


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.conf(leaderbeat_lease_ttl=3)
def test_a_lease_that_comes_back_with_lost_writes_is_taken_over_with_a_higher_epoch(scene: Scene) -> None:
    first = scene.start_beat()
    leader(scene, PATIENCE)
    old = scene.redis.get(scene.key("lease"))
    second = scene.start_beat()
    second.wait_for_log("Standing by", PATIENCE)
    first.kill()
    leader(scene, PATIENCE, other_than=first)
    since = scene.lease().epoch
    # As a replica has it that was cut off meanwhile.
    scene.redis.set(scene.key("lease"), old, px=120_000)
    scene.redis.delete(scene.key("epoch"))
    second.wait_for_log("has come back, though epoch", PATIENCE)
    leader(scene, PATIENCE, other_than=first)
    assert scene.lease().epoch > since
    sent = len(scene.publishes())
    wait_for(lambda: len(scene.publishes()) > sent, PATIENCE, "the sequence goes on")
    check(scene, [second])
