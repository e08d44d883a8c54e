"""What a leader does when the broker is away, mute, full, or has forgotten the connection."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.tick import parse_tick_key
from tests.support.containers import BeatNode, LeaderbeatSetup
from tests.support.scene import Scene, keys_of, leader
from tests.support.servers import RabbitServer, free_port
from tests.support.waits import wait_for, wait_until_steady
from tests.system.test_slots import pretend_outage

#: The machine may be busy with others.
PATIENCE = 40.0

#: A plain task shows that a slot isn't sent twice; a fenced one, that it doesn't run twice if it is.
BOTH = {
    prefer: {"task": f"project.{task}", "every": 1.0, "policy": {"catch_up": "all", "prefer": prefer}}
    for prefer, task in (("missed", "record"), ("duplicate", "fenced"))
}
GOOD = {"good": {"task": "project.record", "every": 1.0, "policy": {"catch_up": "all"}}}

either_broker = pytest.mark.matrix("valkey", "redis+rabbitmq")


def sends(stage: Any, entry: str = "") -> list[str]:
    """The tick keys that a broker has taken from beats, of one entry or of all."""
    return [key for key in keys_of(stage.beat_publishes()) if key.startswith(f"{entry}@" if entry else "")]


def wait_for_sends(stage: Any, count: int, timeout: float = PATIENCE) -> None:
    before = len(sends(stage))
    wait_for(lambda: len(sends(stage)) >= before + count, timeout, f"{count} more slots are sent")


def gaps(keys: list[str], every: float = 1.0) -> list[datetime]:
    """The slots between the first and the last that aren't among `keys`."""
    slots = {parse_tick_key(key)[1] for key in keys}
    first = min(slots)
    count = round((max(slots) - first).total_seconds() / every)
    all_slots = {first + timedelta(seconds=every * number) for number in range(count)}
    return sorted(all_slots - slots)


def assert_nothing_twice(stage: Any) -> None:
    assert max(Counter(sends(stage, "missed")).values(), default=1) == 1
    assert max(Counter(keys_of(stage.runs())).values(), default=1) == 1


def wait_until_run(stage: Any, entry: str) -> None:
    """Wait until the slots that `entry` has sent have run, whether the broker said so or not."""
    keys = set(sends(stage, entry))
    wait_for(lambda: keys <= set(keys_of(stage.runs("end"))), PATIENCE, "what was sent has run")


# Mute


@pytest.mark.schedule({**BOTH, **GOOD})
@pytest.mark.beats(2, proxied=("broker",))
@pytest.mark.workers(0)
@either_broker
def test_a_broker_that_is_mute_for_the_leader_alone_costs_it_the_lead_within_the_ttl(
    celery_setup: LeaderbeatSetup,
) -> None:
    first = leader(celery_setup)
    wait_for_sends(celery_setup, 3)
    began = time.monotonic()
    first.broker_proxy.freeze("both")
    second = leader(celery_setup, PATIENCE, other_than=first)
    assert time.monotonic() - began < 15, "the TTL, by default"
    first.wait_for_log(re.compile(r"Handed over: .*\(it steps down for 15 s: it can't publish: "))
    assert not first.find("No longer the leader")
    wait_for(
        lambda: {record.pid for record in celery_setup.beat_publishes()} == {first.pid, second.pid},
        PATIENCE,
        "the other one sends",
    )
    epoch = celery_setup.lease().epoch
    wait_for_sends(celery_setup, 6)
    assert celery_setup.lease().epoch == epoch
    for entry, lost in (("duplicate", 0), ("missed", 1), ("good", 1)):
        # At most the one that was on its way.
        wait_for(lambda: len(gaps(sends(celery_setup, entry))) <= lost, PATIENCE, "what waited is sent")  # noqa: B023
    assert_nothing_twice(celery_setup)
    unknown = gaps(sends(celery_setup, "missed"))
    assert all(first.find(re.compile(r"Entry 'missed': the slot .* is missed: unconfirmed")) for _ in unknown)
    # What was held back comes late.
    first.broker_proxy.resume()
    celery_setup.add_worker()
    for entry in BOTH:
        wait_until_run(celery_setup, entry)
    assert_nothing_twice(celery_setup)


@contextmanager
def silenced(server: Any) -> Iterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


def broker_of(scene: Scene, start_redis: Any) -> tuple[Any, dict[str, str]]:
    """A broker that can be stopped while the ledger goes on, and the environment that names it."""
    if scene.rabbit is not None:
        return scene.rabbit, {}
    broker = start_redis("valkey")
    return broker, {"CELERY_BROKER_URL": broker.url(0)}


@pytest.mark.schedule(BOTH)
# Whoever leads next has to find that out while the first is in retreat, for a TTL: a busy machine may hold it up.
@pytest.mark.conf(leaderbeat_lease_ttl=5, leaderbeat_publish_timeout=1)
@either_broker
def test_a_broker_that_is_mute_for_all_sends_the_lead_round_once_and_not_in_a_circle(
    scene: Scene, start_redis: Any
) -> None:
    broker, env = broker_of(scene, start_redis)
    beats = [scene.start_beat(env=env, wait=False) for _ in range(2)]
    first = leader(scene)
    wait_for_sends(scene, 2)
    with silenced(broker):
        first.wait_for_log("it steps down for 5 s: it can't publish", PATIENCE)
        second = next(beat for beat in beats if beat is not first)
        second.wait_for_log("goes on leading, because no other could do better: it can't publish", PATIENCE)
        # In turns, ever more rarely. One broker is enough to see that.
        if scene.rabbit is None:
            wait_for(
                lambda: [b for b in beats if b.find("it steps down for 10 s")], PATIENCE, "the next round"
            )
        assert max(len(beat.find("it steps down for 5 s")) for beat in beats) == 1
    wait_for_sends(scene, 4)
    scene.start_worker(env=env)
    wait_until_run(scene, "duplicate")
    wait_until_run(scene, "missed")
    assert_nothing_twice(scene)
    assert not gaps([key for key in keys_of(scene.runs()) if key.startswith("duplicate@")])


# RabbitMQ says that it takes nothing


@contextmanager
def alarmed(rabbit: RabbitServer) -> Iterator[None]:
    rabbit.ctl("set_vm_memory_high_watermark", "0.00001")
    try:
        yield
    finally:
        rabbit.ctl("set_vm_memory_high_watermark", "0.6")


@pytest.mark.schedule(BOTH)
@pytest.mark.beats(2, proxied=("broker",))
@pytest.mark.conf(leaderbeat_lease_ttl=6, leaderbeat_publish_timeout=1)
@pytest.mark.matrix("redis+rabbitmq")
def test_a_memory_alarm_of_rabbitmq_costs_no_lead_and_at_most_the_slot_on_its_way(
    celery_setup: LeaderbeatSetup,
) -> None:
    first = leader(celery_setup)
    wait_for_sends(celery_setup, 2)
    with alarmed(celery_setup.rabbit):
        first.wait_for_log("The broker has blocked the connection", timeout=PATIENCE)
        accepted = first.broker_proxy.accepted
        for entry in BOTH:
            blocked = rf"Slot {entry}@\S+ is not sent yet: the broker has blocked the connection"
            first.wait_for_log(re.compile(blocked), timeout=PATIENCE)
        # Longer than it takes to step down before a silent broker.
        until = time.monotonic() + 4
        wait_for(lambda: time.monotonic() > until, PATIENCE, "it would have stepped down")
        assert len(first.find("unconfirmed")) <= 1
        assert first.broker_proxy.accepted == accepted, "a new connection would cost one more slot"
    first.wait_for_log("The broker takes messages again")
    # The old one still has a confirm to come, which would be taken for another message's.
    wait_for(lambda: first.broker_proxy.accepted == accepted + 1, PATIENCE, "a new connection is made")
    wait_for_sends(celery_setup, 6)
    assert leader(celery_setup) is first
    assert not first.find("steps down")
    for entry in BOTH:
        wait_until_run(celery_setup, entry)
        ran = [key for key in keys_of(celery_setup.runs()) if key.startswith(f"{entry}@")]
        assert not gaps(ran), "also the one whose outcome was unknown"
    assert_nothing_twice(celery_setup)


# A connection that nobody knows to be dead

RARE = {
    prefer: {"task": "project.fenced", "every": 4.0, "policy": {"prefer": prefer}}
    for prefer in ("missed", "duplicate")
}


@pytest.mark.schedule(RARE)
@pytest.mark.beats(1, proxied=("broker",))
@pytest.mark.workers(0)
@either_broker
def test_a_connection_that_died_silently_is_replaced_before_it_takes_a_message(
    celery_setup: LeaderbeatSetup,
) -> None:
    beat = leader(celery_setup)
    wait_for_sends(celery_setup, 2)
    beat.broker_proxy.forget()
    wait_for_sends(celery_setup, 4)
    for entry in RARE:
        assert not gaps(sends(celery_setup, entry), 4.0)
        assert len(set(sends(celery_setup, entry))) == len(sends(celery_setup, entry))
    assert not beat.find(re.compile("is missed|is not sent yet|out of reach"))


BLIND = """
from celery_leaderbeat.link import Link
Link._look = lambda self: None
"""


def blind(stage: Any) -> dict[str, str]:
    """The environment of a beat that doesn't look at its connection before it publishes."""
    path = stage.directory / "blind.py"
    path.write_text(BLIND)
    return {"LB_PLUGIN": str(path)}


@pytest.mark.schedule(BOTH)
@pytest.mark.conf(leaderbeat_lease_ttl=6, leaderbeat_publish_timeout=1)
@either_broker
def test_a_slot_that_a_dead_connection_swallowed_is_sent_again_or_reported(scene: Scene) -> None:
    beat = scene.start_beat(proxied=("broker",), env=blind(scene))
    leader(scene)
    wait_for_sends(scene, 2)
    beat.broker_proxy.forget()
    wait_for(lambda: beat.find(re.compile("unconfirmed|during the publish")), PATIENCE, "one is swallowed")
    wait_for_sends(scene, 6)
    lost = gaps(sends(scene, "missed"))
    said = beat.find(re.compile("Entry 'missed': the slot .* is missed: unconfirmed"))
    assert len(said) == len(lost) <= 1
    assert not gaps(sends(scene, "duplicate"))
    assert_nothing_twice(scene)


@pytest.mark.schedule({"missed": BOTH["missed"]})
@pytest.mark.conf(leaderbeat_lease_ttl=6, leaderbeat_publish_timeout=1)
@either_broker
def test_a_slot_whose_answer_is_lost_is_never_sent_again_where_a_missed_one_is_preferred(
    scene: Scene,
) -> None:
    beat = scene.start_beat(proxied=("broker",), env=blind(scene))
    leader(scene)
    wait_for_sends(scene, 2)
    beat.broker_proxy.freeze("down")
    beat.wait_for_log(re.compile("Entry 'missed': the slot .* is missed: unconfirmed"), PATIENCE)
    beat.broker_proxy.reset()
    beat.broker_proxy.resume()
    wait_for_sends(scene, 4)
    scene.start_worker()
    wait_until_run(scene, "missed")
    runs = keys_of(scene.runs())
    assert not gaps(runs), "also the one that was in doubt: it had arrived"
    assert len(set(runs) - set(sends(scene))) == 1
    assert_nothing_twice(scene)


@pytest.mark.schedule(BOTH)
@pytest.mark.conf(
    leaderbeat_lease_ttl=6, leaderbeat_publish_timeout=1, broker_transport_options={"confirm_publish": False}
)
@pytest.mark.matrix("redis+rabbitmq")
def test_no_slot_counts_as_sent_before_rabbitmq_says_that_it_took_it(scene: Scene) -> None:
    beat = scene.start_beat(proxied=("broker",), env=blind(scene))
    leader(scene)
    wait_for_sends(scene, 2)
    beat.broker_proxy.freeze("up")
    tried = {record.key for record in scene.publishes("before")}

    def swallowed() -> set[str]:
        return {record.key for record in scene.publishes("before")} - tried

    wait_for(swallowed, PATIENCE, "a publish leaves, and doesn't arrive")
    beat.wait_for_log(re.compile("unconfirmed|is not sent yet"), PATIENCE)
    assert not swallowed() & set(sends(scene))
    # What was held back is lost with its connections.
    beat.broker_proxy.reset()
    beat.broker_proxy.resume()
    wait_for_sends(scene, 4)
    scene.start_worker()
    for entry in BOTH:
        wait_until_run(scene, entry)
    assert not gaps(sends(scene, "duplicate"))
    assert_nothing_twice(scene)


# Away


@pytest.mark.schedule(BOTH)
@either_broker
def test_a_broker_that_is_absent_at_start_is_waited_for(scene: Scene) -> None:
    beat = scene.start_beat(cut=("broker",), wait=False)
    line = beat.wait_for_log("The broker is out of reach: no connection to the broker", PATIENCE)
    assert line.level == "WARNING"
    scheme, port = "amqp" if scene.rabbit else "redis", beat.broker_proxy.port
    assert re.search(
        rf"to the broker {scheme}://(guest:\*\*@)?127\.0\.0\.1:{port}/\S* \(broker_url\): ", line.text
    )
    beat.wait_for_log("is not sent yet", PATIENCE)
    beat.broker_proxy.resume()
    beat.wait_for_log("The broker answers again.", PATIENCE)
    wait_for_sends(scene, 4)
    for entry in BOTH:
        assert not gaps(sends(scene, entry)), "none is lost"
    assert max(Counter(sends(scene)).values()) == 1
    assert len(beat.find("out of reach")) == 1, "said once"
    assert not beat.find("Traceback")


@pytest.mark.schedule(GOOD)
@pytest.mark.matrix("valkey+rabbitmq")
def test_a_broker_that_cant_be_used_is_named_with_the_setting_and_what_to_do(scene: Scene) -> None:
    assert scene.rabbit is not None
    scene.rabbit.ctl("add_user", "stranger", "hunter2-s")
    there, nowhere = f"127.0.0.1:{scene.rabbit.port}", f"127.0.0.1:{free_port()}"
    right = f"amqp://guest:guest@{there}/{scene.vhost}"
    bad_login = f"amqp://guest:hunter2@{there}/{scene.vhost}"
    absent = f"amqp://guest:guest@{nowhere}/{scene.vhost}"
    login = "Login was refused .*: check the user and the password in {}"
    refused = "Connection refused'\\)"
    # What is set, and what is said of it.
    cases = {
        "login": ({"CELERY_BROKER_URL": bad_login}, login.format("broker_url")),
        "write": (
            {"CELERY_BROKER_URL": right, "CELERY_BROKER_WRITE_URL": bad_login},
            login.format("broker_write_url"),
        ),
        "vhost": (
            {"CELERY_BROKER_URL": f"amqp://guest:guest@{there}/nosuch"},
            r"vhost nosuch not found.*: create the virtual host \(rabbitmqctl add_vhost\), or correct .* in broker_url",
        ),
        "rights": (
            {"CELERY_BROKER_URL": f"amqp://stranger:hunter2-s@{there}/{scene.vhost}"},
            r"refused for user 'stranger'.*: give the user rights on the virtual host \(rabbitmqctl set_permissions\)",
        ),
        "port": ({"CELERY_BROKER_URL": absent}, refused),
        "list": (
            {"CELERY_BROKER_URL": f"{absent};{bad_login}"},
            rf"{refused}; none to amqp://guest:\*\*@{there}/{scene.vhost}: .*{login.format('broker_url')}",
        ),
    }
    beats = {
        name: scene.start_beat(env=env, conf={"leaderbeat_key_prefix": name}, loglevel="DEBUG", wait=False)
        for name, (env, _) in cases.items()
    }
    for name, (env, said) in cases.items():
        setting = "broker_write_url" if name == "write" else "broker_url"
        url = env[f"CELERY_{setting.upper()}"].partition(";")[0]
        shown = re.escape(re.sub(":[^:]*@", ":**@", url))
        line = beats[name].wait_for_log(
            re.compile(
                rf"The broker is out of reach: no connection to the broker {shown} \({setting}\): .*{said}"
            ),
            PATIENCE,
        )
        assert line.level == "WARNING"
        beats[name].wait_for_log("is not sent yet: no connection to the broker", PATIENCE)
    for beat in beats.values():
        assert "hunter2" not in beat.text()
        assert "guest:guest" not in beat.text()
        assert beat.status == "running"


@pytest.mark.schedule(
    {
        **BOTH,
        "hourly": {"task": "project.fenced", "crontab": {"minute": 0}},
        "strict": {"task": "project.fenced", "every": 3600.0, "policy": {"deadline": 1.0}},
    }
)
@pytest.mark.conf(leaderbeat_lease_ttl=3)
@either_broker
def test_one_replica_goes_on_with_one_copy_of_each_slot_after_an_outage_of_the_broker(scene: Scene) -> None:
    pretend_outage(scene, timedelta(hours=1))
    began = datetime.now(timezone.utc)
    beats = [scene.start_beat(cut=("broker",), wait=False) for _ in range(2)]
    for beat in beats:
        beat.wait_for_log("it steps down for 3 s: it can't publish", PATIENCE)
    for beat in beats:
        beat.broker_proxy.resume()
    wait_for(lambda: sends(scene, "hourly"), PATIENCE, "the hourly slot is sent late")

    def complete(entry: str) -> bool:
        keys = [key for key in sends(scene, entry) if parse_tick_key(key)[1] > began]
        return len(keys) > 6 and not gaps(keys)

    for entry in BOTH:
        wait_for(lambda: complete(entry), PATIENCE, "every slot of the outage is sent")  # noqa: B023
    wait_until_steady(lambda: scene.redis.get(scene.key("epoch")), 1.0)
    assert max(Counter(sends(scene)).values()) == 1
    assert not sends(scene, "strict")
    missed = re.compile("Entry 'strict': the slot .* is missed: older than the deadline")
    assert sum(len(beat.find(missed)) for beat in beats) == 1


# Stopping


@pytest.mark.schedule(BOTH)
@pytest.mark.beats(0)
@pytest.mark.conf(leaderbeat_lease_ttl=6, leaderbeat_publish_timeout=1.5)
@either_broker
def test_a_leader_that_is_stopped_while_the_brokers_answer_is_late_leaves_a_slot_with_a_known_end(
    celery_setup: LeaderbeatSetup,
) -> None:
    for _ in range(2):
        celery_setup.add_beat(proxied=("broker",), env=blind(celery_setup))
    first: BeatNode = leader(celery_setup)
    wait_for_sends(celery_setup, 2)
    first.broker_proxy.freeze("down")
    started = len(celery_setup.publishes("before"))
    wait_for(lambda: len(celery_setup.publishes("before")) > started, PATIENCE, "a publish hangs")
    began = time.monotonic()
    first.terminate()
    assert first.wait(10) == 0
    assert time.monotonic() - began < 3
    assert not first.find("Traceback")
    leader(celery_setup, other_than=first)
    wait_for_sends(celery_setup, 6)

    def undecided() -> list[str]:
        keys = [
            key.partition(":slot:")[2] for key in celery_setup.redis.scan_iter(match="*:slot:*", count=500)
        ]
        states = {key: celery_setup.slot(key).get("state") for key in keys}
        return [
            key for key, state in states.items() if state == "claimed" and parse_tick_key(key)[1] < before
        ]

    before = max(parse_tick_key(key)[1] for key in sends(celery_setup))
    wait_for(lambda: not undecided(), PATIENCE, lambda: f"all are decided: {undecided()}")
    for entry in BOTH:
        wait_until_run(celery_setup, entry)
    assert_nothing_twice(celery_setup)
    assert not gaps([key for key in keys_of(celery_setup.runs()) if key.startswith("duplicate@")])


# What one entry has done wrong

REFUSED = """
from kombu import Exchange, Queue
strange = Queue("strange", Exchange("strange"), routing_key="strange", durable=False)
wrong = {
    "other arguments": {"queue": strange},
    "no exchange": {"exchange": "nowhere", "routing_key": "x", "exchange_type": "topic"},
    "no queue": {"exchange": "amq.topic", "routing_key": "x", "exchange_type": "topic", "mandatory": True},
    "not implemented": {"immediate": True},
    "no such header": {"headers": {"x": object}, "serializer": "pickle"},
    "wrong type": {"queue": "wrong"},
}
for name in os.environ["LB_WRONG"].split(","):
    app.conf.beat_schedule[name] = {"task": "project.record", "schedule": 1.0, "options": wrong[name]}
"""


@pytest.mark.schedule(GOOD)
@pytest.mark.conf(leaderbeat_lease_ttl=3)
@either_broker
def test_what_the_broker_refuses_of_one_entry_holds_up_no_other(scene: Scene) -> None:
    if scene.rabbit is None:
        wrong = ["wrong type"]
        scene.ledger.client(scene.BROKER_DB).set("wrong", "not a list")
    else:
        from kombu import Connection, Queue

        wrong = ["other arguments", "no exchange", "no queue", "not implemented"]
        with Connection(scene.broker_url) as connection:
            Queue("strange", durable=True, channel=connection.channel()).declare()
    (scene.directory / "wrong.py").write_text("import os\n" + REFUSED)
    beats = [
        scene.start_beat(env={"LB_PLUGIN": str(scene.directory / "wrong.py"), "LB_WRONG": ",".join(wrong)})
        for _ in range(2)
    ]
    first = leader(scene)
    for name in wrong:
        refused = re.compile(rf"Slot {name}@\S+ is not sent yet: the broker refused it: ")
        first.wait_for_log(refused, PATIENCE)
    wait_for_sends(scene, 6)
    assert not gaps(sends(scene, "good"))
    assert set(sends(scene)) == set(sends(scene, "good"))
    assert max(Counter(sends(scene)).values()) == 1
    assert not [
        line for beat in beats for line in beat.find(re.compile("steps down|out of reach|unconfirmed"))
    ]


# Several hosts


@pytest.mark.schedule(GOOD)
@pytest.mark.conf(leaderbeat_publish_timeout=1)
@either_broker
def test_a_mute_host_is_followed_by_the_next_one_of_the_url(scene: Scene) -> None:
    broker = scene.rabbit or scene.ledger
    mute, refusing = scene.proxy(broker.port), scene.proxy(broker.port)
    mute.freeze()
    refusing.cut()
    urls = [
        proxy.amqp_url(scene.vhost) if scene.rabbit else proxy.redis_url(scene.BROKER_DB)
        for proxy in (mute, refusing)
    ]
    beat = scene.start_beat(env={"CELERY_BROKER_URL": ";".join([*urls, scene.broker_url])})
    wait_for_sends(scene, 3)
    assert not gaps(sends(scene, "good"))
    assert not beat.find(re.compile("is missed|Traceback"))
