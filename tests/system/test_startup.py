"""What beat and a worker accept, refuse and say when they start."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import REPO, Process
from tests.support.scene import Scene, keys_of
from tests.support.servers import RedisServer
from tests.support.waits import wait_for

#: The machine may be busy with others.
PATIENCE = 40.0

pytestmark = pytest.mark.matrix("valkey")

#: A project of the test's own, with a task that notes its runs. What makes it differ comes before and after.
TASKS = """
@app.task(name="proj.job", base=FencedTask, bind=True)
def job(self, *args):
    with open(os.environ["LB_RUNS"], "a") as file:
        file.write(f"{self.tick.key if self.tick else None}\\n")
"""

Launch = Callable[..., Process]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A function that starts `celery -A proj …` on a project of the test's own, in an empty directory."""
    started: list[Process] = []

    def start(
        command: str, make_app: str, *args: str, modules: dict[str, str] | None = None, **env: Any
    ) -> Process:
        number = len(started)
        code = tmp_path / f"code{number}"
        code.mkdir()
        source = "import os\n\nfrom celery import Celery\n\nfrom celery_leaderbeat import FencedTask\n\n"
        (code / "proj.py").write_text(source + textwrap.dedent(make_app) + TASKS)
        for name, text in (modules or {}).items():
            (code / f"{name}.py").write_text(textwrap.dedent(text))
        if command == "beat":
            args = ("-S", "leaderbeat", "-l", "INFO", *args)
        if command == "worker":
            args = ("-P", "solo", "-l", "INFO", "--without-mingle", "--without-gossip", *args)
        process = Process(
            [sys.executable, "-m", "celery", "-A", "proj", command, *args],
            name=f"{command}{number}",
            directory=tmp_path / f"{command}{number}",
            env={
                "PYTHONPATH": f"{code}:{REPO}",
                "LB_RUNS": str(tmp_path / "runs"),
                "CELERY_BROKER_URL": None,
                "CELERY_RESULT_BACKEND": None,
                **env,
            },
        )
        started.append(process)
        process.start()
        return process

    yield start
    for process in started:
        process.stop()


def errors(process: Process) -> list[str]:
    """The log's lines of level ERROR."""
    return list(dict.fromkeys(line.text for line in process.lines() if line.level == "ERROR"))


def runs(tmp_path: Path) -> list[str]:
    """The tick keys of the runs of `proj.job`."""
    path = tmp_path / "runs"
    return path.read_text().splitlines() if path.exists() else []


# Entries

GOOD = {"task": "project.fenced", "every": 1.0}
RAW = {"task": "project.fenced", "schedule": 1.0}
#: Entry -> (what it is, the key that the message has to name).
BAD: dict[str, tuple[Any, str]] = {
    "nothing": (None, "None"),
    "a text": ("every minute", "every minute"),
    "unknown key": ({**RAW, "arguments": [1]}, "'arguments'"),
    "string schedule": ({**RAW, "schedule": "*/5 * * * *"}, "schedule"),
    "zero": ({**RAW, "schedule": 0}, "interval is 0 s"),
    "negative": ({**RAW, "schedule": -5}, "interval is -5 s"),
    "tiny": ({**RAW, "schedule": 0.0001}, "interval is 0.0001 s"),
    "no task": ({"schedule": 1.0}, "'task'"),
    "null task": ({**RAW, "task": None}, "'task'"),
    "number as task": ({**RAW, "task": 5}, "task"),
    "no schedule": ({"task": "project.fenced"}, "'schedule'"),
    "list as schedule": ({**RAW, "schedule": [1, 2]}, "schedule"),
    "text as args": ({**RAW, "args": "abc"}, "'args'"),
    "number as args": ({**RAW, "args": 3}, "'args'"),
    "list as kwargs": ({**RAW, "kwargs": ["a"]}, "'kwargs'"),
    "list as options": ({**RAW, "options": ["a"]}, "'options'"),
    "policy key": ({**RAW, "options": {"leaderbeat": {"prefers": "missed"}}}, "'prefers'"),
    "policy value": ({**RAW, "options": {"leaderbeat": {"catch_up": "newest"}}}, "catch_up"),
    "policy lookback": ({**RAW, "options": {"leaderbeat": {"lookback": 0}}}, "lookback"),
    "policy deadline": ({**RAW, "options": {"leaderbeat": {"deadline": -1}}}, "deadline"),
    "policy mix": ({**RAW, "options": {"leaderbeat": {"catch_up": "none", "lookback": 3}}}, "lookback"),
    "policy text": ({**RAW, "options": {"leaderbeat": "missed"}}, "leaderbeat"),
    "": (RAW, "name"),
}


@pytest.mark.schedule(
    {
        "first": GOOD,
        **{name: {"raw": raw} for name, (raw, _) in BAD.items()},
        "last": GOOD,
    }
)
def test_a_bad_entry_is_one_error_that_names_it_and_its_key_and_the_others_run(
    scene: Scene, tmp_path: Path
) -> None:
    # Newer versions of Celery refuse such a crontab when it is made.
    february = """
    from celery.schedules import crontab

    never = crontab(minute=0, day_of_month=31, month_of_year=1)
    never.month_of_year, never._orig_month_of_year = {2}, "2"
    app.conf.beat_schedule["february"] = {"task": "project.fenced", "schedule": never}
    """
    (tmp_path / "february.py").write_text(textwrap.dedent(february))
    beat = scene.start_beat(env={"LB_PLUGIN": str(tmp_path / "february.py")})
    wait_for(
        lambda: {key.partition("@")[0] for key in keys_of(scene.publishes())} >= {"first", "last"},
        PATIENCE,
        "the good ones are sent",
    )
    found = [line for line in beat.lines() if line.level == "ERROR"]
    for name, (_, key) in BAD.items():
        mine = [line for line in found if f"ntry {name!r}" in line.text]
        assert len(mine) == 1, f"{name}: {mine}"
        assert key in mine[0].text
        assert re.search(r"[.?] The other entries run\.$", mine[0].text), "two sentences"
    (parked,) = [line for line in found if "'february'" in line.text]
    assert "never comes due" in parked.text
    assert len(found) == len(BAD) + 1, "and nothing else"
    assert not beat.find("Traceback")
    beat.terminate()
    assert beat.wait()["StatusCode"] == 0
    assert {key.partition("@")[0] for key in keys_of(scene.publishes())} == {"first", "last"}


def test_entries_added_by_signals_are_there_from_the_first_tick(scene: Scene, launch: Launch) -> None:
    make_app = f"""
    app = Celery("proj", broker={scene.broker_url!r}, set_as_current=True)

    @app.on_after_configure.connect
    def configured(sender, **_):
        sender.add_periodic_task(1.0, sender.signature("proj.job", args=("a",)), name="configured")

    @app.on_after_finalize.connect
    def finalized(sender, **_):
        sender.add_periodic_task(
            1.0, sender.tasks["proj.job"].s("b"), name="finalized", leaderbeat={{"prefer": "duplicate"}}
        )

    app.conf.beat_schedule = {{"static": {{"task": "proj.job", "schedule": 1.0}}}}
    """
    beat = launch("beat", make_app)
    names = ("configured", "finalized", "static")
    for name in names:
        beat.wait_for_log(f"Sending due task {name}", PATIENCE)
    first = {name: beat.find(f"Sending due task {name}")[0].t for name in names}
    assert max(first.values()) - min(first.values()) < 0.9, "all with the first slot"
    assert len(beat.find(re.compile(r"Entry '\w+' is new"))) == 3
    assert errors(beat) == []


def test_backend_cleanup_is_installed_as_by_celery(scene: Scene, launch: Launch, tmp_path: Path) -> None:
    """With a backend that forgets nothing by itself, and not with Redis."""
    common = f'app = Celery("proj", broker={scene.broker_url!r}, backend=os.environ["BACKEND"])\n'
    common += 'app.conf.beat_schedule = {"tick": {"task": "proj.job", "schedule": 1.0}}\n'
    (tmp_path / "results").mkdir()
    beat = launch("beat", common, BACKEND=scene.backend_url)
    beat.wait_for_log("Entry 'tick' is new", PATIENCE)
    beat.wait_for_log("Sending due task tick", PATIENCE)
    assert not beat.find("backend_cleanup")
    beat.terminate()
    beat.wait()
    beat = launch("beat", common, BACKEND=f"file://{tmp_path / 'results'}")
    beat.wait_for_log("Entry 'celery.backend_cleanup' is new", PATIENCE)
    beat.wait_for_log("Sending due task tick", PATIENCE)
    assert errors(beat) == []
    status = launch("leaderbeat", common, "status", BACKEND=scene.backend_url)
    assert status.wait(PATIENCE)["StatusCode"] == 0
    assert re.search(r"entry +celery\.backend_cleanup: no slot yet since \S+Z", status.text())


# Settings

#: How the app is made, its settings in a module, and the name under which the lease's TTL is found.
SPELLINGS = {
    "django": (
        """
        app = Celery("proj")
        app.config_from_object("site_settings", namespace="CELERY")
        """,
        """
        CELERY_BROKER_URL = {broker!r}
        CELERY_BEAT_SCHEDULE = {schedule}
        CELERY_LEADERBEAT_LEASE_TTL = 7.5
        CELERY_LEADERBEAT_KEY_PREFIX = "mine"
        """,
        "CELERY_LEADERBEAT_LEASE_TTL",
    ),
    "lower": (
        """
        app = Celery("proj")
        app.config_from_object("site_settings")
        """,
        """
        broker_url = {broker!r}
        beat_schedule = {schedule}
        leaderbeat_lease_ttl = "7.5"
        leaderbeat_key_prefix = "mine"
        """,
        "leaderbeat_lease_ttl",
    ),
    "upper": (
        """
        app = Celery("proj")
        app.config_from_object("site_settings")
        """,
        """
        BROKER_URL = {broker!r}
        CELERYBEAT_SCHEDULE = {schedule}
        LEADERBEAT_LEASE_TTL = 7.5
        LEADERBEAT_KEY_PREFIX = "mine"
        """,
        "LEADERBEAT_LEASE_TTL",
    ),
    "conf": (
        """
        import site_settings

        app = Celery("proj", broker=site_settings.broker)
        app.conf.beat_schedule = site_settings.schedule
        app.conf.leaderbeat_lease_ttl = 7.5
        app.conf["leaderbeat_key_prefix"] = "mine"
        """,
        """
        broker = {broker!r}
        schedule = {schedule}
        """,
        "leaderbeat_lease_ttl",
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_settings_are_found_in_every_spelling_by_beat_and_by_workers(
    scene: Scene, launch: Launch, tmp_path: Path, spelling: str
) -> None:
    make_app, settings, name = SPELLINGS[spelling]
    schedule = {"tick": {"task": "proj.job", "schedule": 1.0}}
    modules = {"site_settings": textwrap.dedent(settings).format(broker=scene.broker_url, schedule=schedule)}
    worker = launch("worker", make_app, modules=modules)
    beat = launch("beat", make_app, modules=modules)
    beat.wait_for_log(f"lease ttl -> 7.5s ({name})", PATIENCE)
    key = wait_for(lambda: runs(tmp_path), PATIENCE, "a run")[0]
    # The broker is the ledger where nothing else is said.
    client = scene.ledger.client(scene.BROKER_DB)
    slot = f"{{mine}}:slot:{key}"
    wait_for(lambda: client.hget(slot, "state") == "done", PATIENCE, lambda: f"done: {client.hgetall(slot)}")
    assert client.exists("{mine}:lease") == 1
    assert scene.redis.keys("*") == []
    assert errors(beat) == errors(worker) == []
    assert not beat.find("WARNING")


@pytest.mark.parametrize(
    ("namespace", "typo", "nearest"),
    [
        ("", "leaderbeat_lease_tll", "leaderbeat_lease_ttl"),
        ("CELERY", "CELERY_LEADERBEAT_KEY_PREFX", "CELERY_LEADERBEAT_KEY_PREFIX"),
    ],
)
def test_a_misspelled_setting_is_named_with_the_nearest_by_beat_and_by_workers(
    scene: Scene, launch: Launch, tmp_path: Path, namespace: str, typo: str, nearest: str
) -> None:
    schedule = {"tick": {"task": "proj.job", "schedule": 1.0}}
    prefix = "CELERY_" if namespace else ""
    names = ("BROKER_URL", "BEAT_SCHEDULE") if namespace else ("broker_url", "beat_schedule")
    settings = f"{prefix}{names[0]} = {scene.broker_url!r}\n{prefix}{names[1]} = {schedule}\n{typo} = 'x'\n"
    make_app = (
        f'app = Celery("proj")\napp.config_from_object("site_settings", namespace={namespace!r} or None)\n'
    )
    modules = {"site_settings": settings}
    worker = launch("worker", make_app, modules=modules)
    beat = launch("beat", make_app, modules=modules)
    message = f"{typo} isn't a setting of leaderbeat; did you mean {nearest}?"
    for process in (beat, worker):
        wait_for(
            lambda: any(line.level == "WARNING" for line in process.find(message)),  # noqa: B023
            PATIENCE,
            process.tail,
        )
    wait_for(lambda: runs(tmp_path), PATIENCE, "they work all the same")


MIXES = {
    "renewal": {"leaderbeat_lease_ttl": 5, "leaderbeat_renew_interval": 6},
    "renewal at the margin": {"leaderbeat_lease_ttl": 10, "leaderbeat_renew_interval": 9.5},
    "publish": {"leaderbeat_lease_ttl": 6, "leaderbeat_publish_timeout": 7},
    "stall": {"leaderbeat_publish_timeout": 4, "leaderbeat_stall_timeout": 3},
    "lease": {"leaderbeat_lease_ttl": 0.5},
    "lease as a word": {"leaderbeat_lease_ttl": "long"},
    "clock": {"leaderbeat_clock": "sundial"},
    "policy": {"leaderbeat_policy": {"prefer": "both"}},
    "policy mix": {"leaderbeat_policy": {"catch_up": "none", "lookback": 2}},
    "prefix": {"leaderbeat_key_prefix": "a{b}"},
    "options": {"leaderbeat_redis_options": {"socket_timeuot": 3}},
    "url": {"leaderbeat_redis_url": "redis://:s3cret@127.0.0.1:6379/zero"},
    "sentinel": {"leaderbeat_redis_url": "sentinel://:s3cret@a:1;sentinel://b:2"},
    "sentinels": {"leaderbeat_redis_url": "sentinel://:s3cret@a:1;redis://b:2"},
    "cluster": {"leaderbeat_redis_url": "redis+cluster://:s3cret@a:1/7"},
    "replicas": {"leaderbeat_min_replicas": 1000},
}


@pytest.mark.parametrize(
    ("command", "mix"), [*(("beat", mix) for mix in MIXES), ("worker", "renewal"), ("worker", "url")]
)
def test_settings_that_cannot_work_are_refused_before_any_connection(
    scene: Scene, launch: Launch, command: str, mix: str
) -> None:
    way = scene.proxy(scene.ledger.port)
    broker = f"redis://user:s3cret@127.0.0.1:{way.port}/0"
    process = launch(command, f'app = Celery("proj", broker={broker!r})\napp.conf.update({MIXES[mix]!r})\n')
    try:
        assert process.wait(15)["StatusCode"] not in (0, None)
    finally:
        text = process.text()
        assert "s3cret" not in text
    assert way.accepted == 0
    last = text.strip().splitlines()[-1]
    for name, value in MIXES[mix].items():
        assert name in last
        if isinstance(value, (int, float)):
            assert re.search(rf"\b{value:g}\b", last)
        if isinstance(value, dict):
            assert all(key in last for key in value) or "lookback" in last
    assert re.search(f"CRITICAL/MainProcess\\] This {command} can't start: ", last)
    assert "Traceback" not in text


def test_without_any_redis_beat_says_what_to_set(launch: Launch) -> None:
    beat = launch(
        "beat", 'app = Celery("proj", broker="amqp://guest:s3cret@127.0.0.1:1//", backend="rpc://")\n'
    )
    assert beat.wait(PATIENCE)["StatusCode"] not in (0, None)
    last = beat.text().strip().splitlines()[-1]
    assert "leaderbeat_redis_url isn't set, broker_url is amqp:// and result_backend is rpc://" in last
    assert "Set leaderbeat_redis_url = 'redis://" in last
    assert "s3cret" not in beat.text()


# Who leads, for the eye


def test_status_shows_the_leader_the_entries_and_the_totals(
    scene: Scene, launch: Launch, tmp_path: Path
) -> None:
    make_app = f'app = Celery("proj", broker={scene.broker_url!r})\n'
    schedule = 'app.conf.beat_schedule = {"tick": {"task": "proj.job", "schedule": 1.0}}\n'
    empty = launch("leaderbeat", make_app, "status")
    assert empty.wait(PATIENCE)["StatusCode"] == 0
    assert "leader    none: the lease is free" in empty.text()
    assert "totals    none" in empty.text()
    beat = launch("beat", make_app + schedule)
    beat.wait_for_log("Sending due task tick", PATIENCE)
    full = launch("leaderbeat", make_app, "status")
    assert full.wait(PATIENCE)["StatusCode"] == 0
    line = rf"^leader +\S+:{beat.pid}:\w+, epoch \d+, since \S+T\S+Z; its lease has \d+\.\d s left$"
    assert re.search(line, full.text(), re.MULTILINE)
    assert re.search(rf"^replica +\S+:{beat.pid}:\w+$", full.text(), re.MULTILINE)
    assert re.search(
        r"^entry +tick: last decided \S+Z, \d+ claimed, \d+ missed, 0 skipped$", full.text(), re.MULTILINE
    )
    assert re.search(r"^totals .*claimed \d+.*sent \d+", full.text(), re.MULTILINE)
    lost = launch("leaderbeat", 'app = Celery("proj", broker="redis://:s3cret@127.0.0.1:1/0")\n', "status")
    assert lost.wait(PATIENCE)["StatusCode"] == 1
    assert "Traceback" not in lost.text()
    assert "Error: Redis gave no answer" in lost.text()
    assert "s3cret" not in lost.text()


# What is left behind


def test_beat_writes_no_file(scene: Scene, launch: Launch, tmp_path: Path) -> None:
    make_app = f'app = Celery("proj", broker={scene.broker_url!r})\n'
    make_app += 'app.conf.beat_schedule = {"tick": {"task": "proj.job", "schedule": 1.0}}\n'
    home = tmp_path / "home"
    home.mkdir()
    env = {"HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    beat = launch("beat", make_app, "--schedule", str(home / "schedule"), **env)
    beat.wait_for_log("Sending due task tick", PATIENCE)
    written = [path for path in map(Path, _open_files(beat.pid)) if path.is_file() and path != beat.log_path]
    beat.terminate()
    assert beat.wait()["StatusCode"] == 0
    assert list(home.iterdir()) == []
    assert list(beat.directory.iterdir()) == [beat.log_path]
    assert written == []


def _open_files(pid: int) -> list[str]:
    """The paths behind a process's descriptors that are open for writing."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # A descriptor may be closed while we look.
        with contextlib.suppress(FileNotFoundError):
            info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
            target = link.readlink()
            if int(re.search(r"^flags:\s+(\d+)", info, re.MULTILINE)[1], 8) & 0o3:
                found.append(str(target))
    return found


# Passwords

PASSWORD = "p@ss:w/rd s3cret"
ENCODED = "p%40ss%3Aw%2Frd%20s3cret"
WRONG = "wr0ng-guess"


def test_a_password_is_never_in_any_log(
    start_redis: Callable[..., RedisServer], launch: Launch, tmp_path: Path
) -> None:
    server = start_redis("valkey", "--requirepass", PASSWORD)
    right = f"redis://:{ENCODED}@127.0.0.1:{server.port}"
    make_app = f"""
    app = Celery("proj", broker="{right}/1", backend="{right}/2")
    app.conf.update(
        leaderbeat_redis_url=f"redis://:{{os.environ['LEDGER_PASSWORD']}}@127.0.0.1:{server.port}/0",
        beat_schedule={{"tick": {{"task": "proj.job", "schedule": 1.0}}}},
    )
    """
    good = [
        launch("worker", make_app, "-l", "DEBUG", LEDGER_PASSWORD=ENCODED),
        launch("beat", make_app, "-l", "DEBUG", LEDGER_PASSWORD=ENCODED),
    ]
    wait_for(lambda: len(runs(tmp_path)) >= 2, PATIENCE, "it works")
    for args in (("status",), ("status", "--json")):
        good.append(launch("leaderbeat", make_app, *args, LEDGER_PASSWORD=ENCODED))
        assert good[-1].wait(PATIENCE)["StatusCode"] == 0
    assert json.loads(good[-1].text())["ledger"]["url"] == f"redis://:**@127.0.0.1:{server.port}/0"
    bad_beat = launch("beat", make_app, "-l", "DEBUG", LEDGER_PASSWORD=WRONG)
    bad_beat.wait_for_log(re.compile("WRONGPASS|invalid username-password|Authentication"), PATIENCE)
    good[0].terminate()
    good[0].wait(20)
    bad_worker = launch("worker", make_app, "-l", "DEBUG", LEDGER_PASSWORD=WRONG)
    bad_worker.wait_for_log(re.compile("put off for|WRONGPASS"), PATIENCE)
    bad_status = launch("leaderbeat", make_app, "status", LEDGER_PASSWORD=WRONG)
    assert bad_status.wait(PATIENCE)["StatusCode"] == 1
    assert bad_beat.status == "running"
    assert good[1].status == "running"
    for process in (*good, bad_beat, bad_worker, bad_status):
        text = process.text()
        assert len(text) > 40
        for secret in (PASSWORD, ENCODED, "s3cret", WRONG):
            assert secret not in text, process.name


# Two applications


@pytest.mark.schedule({"tick": GOOD})
def test_two_applications_share_a_redis_and_neither_sees_the_other(scene: Scene) -> None:
    beats = [scene.start_beat(env={"LB_APP_NAME": name}) for name in ("app", "app1")]
    beats += [scene.start_beat(conf={"leaderbeat_key_prefix": prefix}) for prefix in ("p", "p:slot")]
    pids = {beat.pid for beat in beats}
    wait_for(lambda: {sent.pid for sent in scene.publishes()} == pids, PATIENCE, "all of them send")
    ids: dict[str, set[str]] = {}
    for prefix, beat in zip(("leaderbeat:app", "leaderbeat:app1", "p", "p:slot"), beats, strict=True):
        assert json.loads(scene.redis.get(f"{{{prefix}}}:lease"))["pid"] == beat.pid
        for sent in scene.publishes():
            if sent.pid == beat.pid:
                assert scene.redis.hget(f"{{{prefix}}}:slot:{sent.key}", "task_id") == sent.id
                ids.setdefault(sent.id, set()).add(prefix)
    assert all(len(owners) == 1 for owners in ids.values()), "a slot of another app has another task id"
    assert not any(errors(beat) for beat in beats)


@pytest.mark.schedule({"tick": GOOD})
def test_another_application_under_the_same_prefix_is_an_error_and_does_not_lead(scene: Scene) -> None:
    conf = {"leaderbeat_key_prefix": "shared"}
    first = scene.start_beat(conf=conf, env={"LB_APP_NAME": "one"})
    first.wait_for_log("Elected", PATIENCE)
    second = scene.start_beat(conf=conf, env={"LB_APP_NAME": "two"})
    line = second.wait_for_log("belongs to the application 'one', and this one is 'two'", 15)
    assert line.level == "ERROR"
    assert "leaderbeat_key_prefix" in line.text
    first.terminate()
    first.wait()
    before = len(scene.publishes())
    third = scene.start_beat(conf=conf, env={"LB_APP_NAME": "one"})
    wait_for(lambda: len(scene.publishes()) > before + 1, PATIENCE, "the rightful app goes on")
    assert {sent.pid for sent in scene.publishes()} <= {first.pid, third.pid}
    assert second.status == "running"


ODD = [
    "with space",
    "a:b",
    "{braces}",
    "*",
    "ключ",
    "at@sign@2026-01-01T00:00:00Z",
    "x" * 300,
    "per%cent",
    "new\nline",
]


@pytest.mark.schedule(dict.fromkeys(ODD, GOOD))
def test_entry_names_of_any_kind_are_sent_and_run(scene: Scene) -> None:
    beat = scene.start_beat()
    scene.start_worker()

    def ran() -> set[str]:
        return {run.key.rpartition("@")[0] for run in scene.runs("end")}

    wait_for(lambda: ran() == set(ODD), PATIENCE, lambda: f"all run; missing: {set(ODD) - ran()}")
    beat.terminate()
    beat.wait()
    assert len(set(keys_of(scene.runs()))) == len(scene.runs())
    for run in scene.runs("end"):
        wait_for(lambda: scene.slot(run.key).get("state") == "done", PATIENCE, f"{run.key} is done")  # noqa: B023
    assert set(scene.redis.hkeys(scene.key("entries"))) == set(ODD)
    assert errors(beat) == []
