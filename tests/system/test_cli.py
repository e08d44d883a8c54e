"""`celery -A proj leaderbeat …`: what it shows, the orders it gives, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_leaderbeat.cli import leaderbeat
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.singleton import run_once
from tests.support.process import REPO
from tests.support.scene import PROJECT, Scene, leader
from tests.support.waits import wait_for, wait_until_steady

pytestmark = pytest.mark.matrix("valkey")

Run = Callable[..., Result]

HOURLY = {"task": "project.fenced", "every": 3600.0}
TICK = {"task": "project.fenced", "every": 0.5}


@pytest.fixture
def run(scene: Scene) -> Iterator[Run]:
    """A function that runs a command in this process, for an app with the scene's schedule."""
    app = Celery("project", set_as_current=False)
    app.conf.update(
        broker_url=scene.broker_url,
        leaderbeat_redis_url=scene.ledger_url,
        timezone="Europe/Berlin",
        beat_schedule={
            name: {"task": spec["task"], "schedule": spec["every"]} for name, spec in scene.schedule.items()
        },
    )

    def invoke(*args: str, code: int = 0) -> Result:
        result = CliRunner().invoke(leaderbeat, args, obj=SimpleNamespace(app=app))
        assert result.exit_code == code, (args, result.output, result.exception)
        return result

    yield invoke
    Ledger.for_app(app).close()
    app.close()


def iso(instant: datetime) -> str:
    return instant.isoformat()


def moment(text: str) -> datetime:
    """A time as the command line writes it."""
    assert text.endswith("Z"), text
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def now() -> datetime:
    return datetime.now(timezone.utc)


# Without any beat


@pytest.mark.schedule({"nightly bill": HOURLY, "nightly mail": HOURLY, "plain": HOURLY})
def test_what_cant_be_done_is_refused_with_the_thing_and_the_remedy(scene: Scene, run: Run) -> None:
    later, earlier = iso(now() + timedelta(hours=1)), iso(now() - timedelta(hours=1))
    for args, words in {
        ("pause", "nightly bil"): ["'nightly bil'", "Did you mean 'nightly bill'"],
        ("pause", "x"): ["'x'", "The entries are 'nightly bill', 'nightly mail', 'plain'"],
        ("resume", ""): ["There is no entry ''"],
        ("run", "plian"): ["'plian'", "'plain'"],
        ("audit", "plian"): ["'plian'", "'plain'"],
        ("events", "--entry", "plian"): ["'plian'", "'plain'"],
        ("pause",): ["Name one entry, or say --all"],
        ("pause", "plain", "--all"): ["Name one entry, or say --all"],
        ("resume",): ["Name one entry, or say --all"],
        ("pause", "plain", "--until", later, "--for", "2h"): ["--until and --for"],
        ("pause", "plain", "--until", earlier): ["--until is", "has passed", "later than now"],
        ("pause", "plain", "--until", "tomorrow"): ["--until", "'tomorrow'", "2026-10-02T03:00"],
        ("pause", "plain", "--until", "9999-12-31T23:30-12:00"): ["9999-12-31T23:30-12:00"],
        ("pause", "plain", "--for", "0h"): ["--for", "'0h'", "2h"],
        ("pause", "plain", "--for", "90"): ["--for", "'90'", "w, d, h, m or s"],
        ("pause", "plain", "--for", "9999999w"): ["--for", "9999"],
        ("backfill", "plain", "--since", earlier): ["--until"],
        ("backfill", "plain", "--since", later, "--until", earlier): [
            "--until",
            "must be later than --since",
        ],
        ("backfill", "plain", "--since", later, "--until", iso(now() + timedelta(days=1))): ["yet to come"],
        ("backfill", "plain", "--since", "2026-01-01T00:00Z", "--until", "2026-01-01T00:59:59Z"): [
            "'plain' has no slot after 2026-01-01T00:00:00Z up to 2026-01-01T00:59:59Z"
        ],
        ("backfill", "plain", "--since", "2000-01-01", "--until", "2020-01-01"): [
            "10,000",
            "at most at once",
        ],
        ("audit", "plain", "--since", later): ["--since"],
        ("audit", "plain", "--only", "dun"): ["'dun'", "'done'"],
    }.items():
        output = run(*args, code=2).output
        for word in words:
            assert word in output, (args, output)
    assert scene.redis.keys("*") == [], "nothing was written"
    for args in (("resume", "plain"), ("resume", "--all")):
        assert "There is no pause of" in run(*args, code=1).output


@pytest.mark.schedule({"plain": HOURLY})
def test_the_events_of_a_job_outside_celery_are_shown_by_its_name(scene: Scene, run: Run) -> None:
    app = Celery("project", broker=scene.broker_url, set_as_current=False)
    app.conf.leaderbeat_redis_url = scene.ledger_url
    run_once("digest-mail", now().replace(microsecond=0), lambda: None, app=app)
    run("pause", "--all")
    lines = run("events", "--entry", "digest-mail").output.splitlines()
    assert [line.split()[1] for line in lines] == ["started", "done", "paused"]
    output = run("events", "--entry", "digest-mial", code=2).output
    assert "There is no entry 'digest-mial'" in output
    Ledger.for_app(app).close()
    app.close()


@pytest.mark.schedule({"Nightly": HOURLY, "plain": {**HOURLY, "task": "project.record"}})
def test_pauses_and_requests_are_shown_until_they_are_over(scene: Scene, run: Run) -> None:
    assert "until 2999-12-31T23:00:00Z" in run("pause", "Nightly", "--until", "3000-01-01T00:00").output
    replaced = run("pause", "Nightly", "--for", "1d12h", "--note", "new prices", "--by", "ann").output
    assert "This replaces the pause since" in replaced
    assert "until 2999-12-31T23:00:00Z" in replaced
    run("pause", "--all", "--by", "bob")
    key, hint = run("run", "plain").output.splitlines()
    assert re.fullmatch(r"plain@\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z", key)
    assert hint == "Nobody leads now: it is done once a replica leads."
    since, until = "2026-01-01T00:00Z", "2026-01-01T03:00Z"
    asked = run("backfill", "Nightly", "--since", since, "--until", until, "--force").output
    assert "Asked for 3 slots of entry 'Nightly'" in asked
    status = run("status").output
    assert re.search(r"^ledger    redis://127\.0\.0\.1:\d+/\d+, key prefix '\S+'$", status, re.MULTILINE)
    assert "leader    none: the lease is free" in status
    assert re.search(r"^paused    all entries since \S+ by bob, until it is resumed$", status, re.MULTILINE)
    assert re.search(
        r"^paused    entry 'Nightly' since \S+ by ann, until \S+: new prices$", status, re.MULTILINE
    )
    assert re.search(r"^request   run of entry 'plain' for \S+, by \S+@\S+$", status, re.MULTILINE)
    assert (
        "request   backfill of entry 'Nightly' after 2026-01-01T00:00:00Z up to 2026-01-01T03:00:00Z, by "
    ) in status
    shown = json.loads(run("status", "--json").output)
    assert shown["leader"] is None
    assert [(found["entry"], found["by"], found["note"]) for found in shown["paused"]] == [
        ("", "bob", ""),
        ("Nightly", "ann", "new prices"),
    ]
    lasts = moment(shown["paused"][1]["until"]) - moment(shown["paused"][1]["since"])
    assert timedelta(hours=35) < lasts <= timedelta(hours=36)
    backfill, run_now = shown["requests"]
    assert (run_now["kind"], f"{run_now['entry']}@{run_now['slot']}") == ("run", key)
    assert (backfill["kind"], backfill["entry"], backfill["force"]) == ("backfill", "Nightly", True)
    assert (backfill["since"], backfill["until"]) == ("2026-01-01T00:00:00Z", "2026-01-01T03:00:00Z")
    left = run("resume", "Nightly", "--by", "ann").output
    assert re.search(r"^Still, all entries are paused .* \(resume --all\)\.$", left, re.MULTILINE)
    again = run("resume", "Nightly", code=1).output
    assert "There is no pause of entry 'Nightly' to end. But all entries are paused" in again
    run("pause", "plain")
    assert "Still, entry 'plain' is paused" in run("resume", "--all", "--catch-up").output
    run("resume", "plain")
    assert "paused " not in run("status").output
    assert json.loads(run("status", "--json").output)["paused"] == []
    events = [json.loads(line) for line in run("events", "--json").output.splitlines()]
    assert [event["event"] for event in events].count("paused") == 4
    resumed = [(event["entry"], event["by"]) for event in events if event["event"] == "resumed"]
    assert resumed[0] == ("Nightly", "ann")
    of_plain = run("events", "--entry", "plain").output
    assert "all entries (by bob)" in of_plain, "what concerns all entries concerns this one"
    assert "Nightly" not in of_plain


def test_a_server_that_isnt_there_is_a_message_and_no_traceback(scene: Scene, run: Run) -> None:
    scene.ledger.stop()
    for args in ((), ("--json",)):
        result = run("status", *args, code=1)
        assert result.stderr.startswith("Error: Redis gave no answer to ")
        assert result.stdout == ""


# With a leader


@pytest.mark.schedule({"hourly": HOURLY, "tick": TICK, "plain": {**TICK, "task": "project.record"}})
def test_the_leader_carries_the_orders_out(scene: Scene, run: Run) -> None:
    scene.start_beat(wait=False)
    scene.start_worker(wait=False)
    wait_for(lambda: len(scene.runs("end")) >= 4, 20, "slots are run")
    leader(scene)

    run("pause", "tick", "--note", "new prices")
    run("pause", "plain")
    wait_for(lambda: run("status").output.count(" 0 skipped") == 0, 20, "two entries are skipping")
    runs = wait_until_steady(lambda: len(scene.runs()), 1.2)
    assert "tick" not in {record.key.split("@")[0] for record in scene.runs()[runs:]}
    (key, *_) = run("run", "tick").output.splitlines()
    wait_for(lambda: key in [r.key for r in scene.runs("end")], 20, "what is asked for runs in a pause, too")
    run("resume", "--all", code=1)
    run("resume", "plain")
    run("resume", "tick", "--catch-up")

    top = now().replace(minute=0, second=0, microsecond=0)
    span = ("--since", iso(top - timedelta(hours=3)), "--until", iso(top))
    hourly = [f"hourly@{top - timedelta(hours=n):%Y-%m-%dT%H:%M:%SZ}" for n in (2, 1, 0)]
    run("backfill", "hourly", *span)

    def attempts() -> list[tuple[str, int]]:
        return sorted((r.key, r.attempt) for r in scene.runs("end") if r.key.startswith("hourly@"))

    wait_for(lambda: len(attempts()) == 3, 20, "the slots are run")
    run("backfill", "hourly", *span)
    wait_for(lambda: "request " not in run("status").output, 20, "the request is dealt with")
    run("backfill", "hourly", *span, "--force")
    wait_for(lambda: len(attempts()) == 6, 20, "the slots are run again")
    assert attempts() == [(key, attempt) for key in hourly for attempt in (1, 2)]

    audit = json.loads(run("audit", "tick", "--json").output)
    ends = audit["counts"]
    assert ends["done"] >= 3
    assert ends["skipped"] >= 2
    assert "unexplained" not in ends
    slots = {slot["key"]: slot for slot in audit["slots"]}
    assert slots[key]["called_for"] is False
    assert slots[key]["end"] == "done"
    caught_up = [slot for slot in slots.values() if slot["called_for"] and slot.get("request")]
    assert len(caught_up) == 1, "as many as the entry's policy catches up"
    *skipped, known, sums = run("audit", "tick", "--only", "skipped").output.splitlines()
    assert all(re.fullmatch(r"\S+Z +skipped +paused: new prices", line) for line in skipped), skipped
    assert known.startswith("The ledger knows the entry's schedule since ")
    assert sums.startswith("tick, after ")
    assert "asked for by a request" in run("audit", "hourly", *span).output
    status = run("status").output
    assert re.search(r"^entry     hourly: no slot yet since ", status, re.MULTILINE), (
        "requests move nothing on"
    )
    assert re.search(r"^entry     tick: .* claimed, \d+ missed, \d+ skipped$", status, re.MULTILINE), status
    stood = re.search(
        r"^leader    (\S+), epoch (\d+), since (\S+); its lease has \S+ s left$", status, re.MULTILINE
    )
    assert stood, status
    shown = json.loads(run("status", "--json").output)
    led = shown["leader"]
    assert [led["holder"], str(led["epoch"]), led["since"].partition(".")[0].rstrip("Z") + "Z"] == [
        *stood.groups()
    ]
    assert 0 < led["ttl_left"] <= led["ttl"] == 15
    assert shown["replicas"] == [{"holder": led["holder"], "release": ""}]
    assert moment(led["since"]) < moment(shown["at"])
    assert shown["totals"]["claimed"] >= 4
    entries = {entry.pop("entry"): entry for entry in shown["entries"]}
    assert entries["hourly"]["last_decided"] is None
    assert moment(entries["hourly"]["no_slot_since"]) < moment(shown["at"])
    assert entries["tick"]["skipped"] >= 2
    assert moment(entries["tick"]["last_decided"]) <= moment(shown["at"])
    assert entries["plain"]["without_done_marker"] is None, "it never leaves one"
    events = {json.loads(line)["event"] for line in run("events", "--json").output.splitlines()}
    assert {"elected", "defined", "claimed", "sent", "started", "done", "skipped", "paused"} <= events


@pytest.mark.schedule({"tick": TICK, "plain": {**TICK, "task": "project.record"}})
def test_the_real_command_line_and_slots_without_a_done_marker(scene: Scene) -> None:
    scene.start_beat()
    leader(scene)
    wait_for(lambda: len(scene.beat_publishes()) >= 6, 10, "slots are sent that nobody runs")

    def celery(*args: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in scene.env().items() if value is not None}
        command = [sys.executable, "-m", "celery", "-A", PROJECT, "leaderbeat", *args]
        return subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True, timeout=30)

    status = celery("status")
    assert status.returncode == 0, status.stderr
    assert re.search(r"^entry     tick: .*; \d+ slots without a done marker$", status.stdout, re.MULTILINE)
    assert re.search(r"^entry     plain: [^;]*$", status.stdout, re.MULTILINE), "it never leaves one"
    shown = celery("status", "--json")
    assert shown.returncode == 0, shown.stderr
    undone = {entry["entry"]: entry["without_done_marker"] for entry in json.loads(shown.stdout)["entries"]}
    assert undone["tick"] > 0
    assert undone["plain"] is None
    key = celery("run", "tick")
    assert re.fullmatch(r"tick@\S+Z\n", key.stdout), "a script can take it"
    assert key.stderr == ""


@pytest.mark.schedule({"tick": HOURLY})
def test_an_entry_that_was_removed_can_be_audited_and_not_run(scene: Scene, run: Run) -> None:
    scene.start_beat(schedule={"gone": HOURLY, **scene.schedule})
    wait_for(lambda: scene.redis.hexists(scene.key("entries"), "gone"), 20, "it is registered")
    scene.beats[0].terminate()
    scene.start_beat()
    wait_for(lambda: "removed" in run("status").output, 15, "the new leader has found it gone")
    for args in (["run"], ["backfill", "--since", "2026-01-01", "--until", "2026-01-02"]):
        assert "'gone' was removed from the schedule" in run(args[0], "gone", *args[1:], code=2).output
    assert "gone, after" in run("audit", "gone").output

    def entries() -> dict[str, dict[str, Any]]:
        return {entry["entry"]: entry for entry in json.loads(run("status", "--json").output)["entries"]}

    assert moment(entries()["gone"]["removed"]) <= now() + timedelta(minutes=1)
    assert entries()["tick"]["removed"] is None
    for paused, args in (
        ({"tick": True, "gone": False}, ["tick"]),
        ({"tick": True, "gone": True}, ["--all"]),
    ):
        run("pause", *args)
        assert {name: entry["paused"] for name, entry in entries().items()} == paused
