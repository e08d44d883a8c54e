"""The smallest set of rules for a Redis user, as docs/redis.md gives it: it is enough, and nothing in it is too much."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import redis

from tests.support.process import REPO
from tests.support.scene import Scene, leader
from tests.support.servers import RedisServer
from tests.support.waits import wait_for

pytestmark = pytest.mark.matrix("valkey")

#: The machine may be busy with others.
PATIENCE = 40.0
SCHEDULE = {
    "tick": {"task": "project.fenced", "every": 1.0, "policy": {"overlap": "skip", "on_crash": "rerun"}}
}
#: What the driver sends by itself, where it has to.
DRIVER = {"evalsha", "ping", "script|load", "select"}
#: The methods of the driver's client that bear another name than their command.
METHODS = {"hscan_iter": "hscan", "script_load": "script|load", "register_script": "script|load"}
NO_COMMANDS = {"connection_pool", "execute", "execute_command", "pipeline"}


def rules() -> tuple[list[str], set[str]]:
    """The documented rules, and the commands that they allow."""
    text = (REPO / "docs" / "redis.md").read_text()
    found = re.search(r"^ACL SETUSER leaderbeat ([^`]+)```", text, re.MULTILINE)
    assert found
    listed = found[1].split()
    return listed, {rule[1:] for rule in listed if rule.startswith("+")}


def optional() -> set[str]:
    """The commands for what not everybody uses."""
    text = (REPO / "docs" / "redis.md").read_text()
    table = text.partition("And for what not everybody uses:")[2].partition("Without")[0]
    return {name.replace("\\", "") for name in re.findall(r"\+([a-z\\|]+)", table)}


def used() -> set[str]:
    """The commands that the package's scripts and its store use, from their text."""
    package = resources.files("celery_leaderbeat")
    names = set(DRIVER)
    for script in (package / "scripts").iterdir():
        names |= {
            name.lower() for name in re.findall(r"redis\.p?call\('([A-Z]+)'", script.read_text("utf-8"))
        }
    store = (package / "store.py").read_text("utf-8")
    for method in re.findall(r"(?:_client|pipe|\))\.([a-z_]+)\(", store):
        names.add(METHODS.get(method, method))
    names |= {name.lower() for name in re.findall(r'execute_command\("([A-Z]+)"', store)}
    subscriptions = (package / "subscriptions.py").read_text("utf-8")
    names |= {f"pubsub|{name.lower()}" for name in re.findall(r'"([A-Z]*NUMSUB)"', subscriptions)}
    names |= set(re.findall(r"pubsub\.(s?subscribe)\b", subscriptions))
    connections = (package / "connections.py").read_text("utf-8")
    names |= {f"{a}|{b}".lower() for a, b in re.findall(r'node, "([A-Z]+)", "([A-Z-]+)"', connections)}
    return names - NO_COMMANDS


def test_the_documented_rules_allow_what_is_used_and_nothing_else() -> None:
    known = redis_commands()
    needed = {name for name in used() if name.partition("|")[0] in known}
    _, documented = rules()
    documented |= optional() | {"sentinel|get-master-addr-by-name"}
    assert needed - documented == set(), "docs/redis.md lacks them"
    assert documented - needed == set(), "docs/redis.md has them for nothing"


def redis_commands() -> set[str]:
    """All words that a command can begin with, as far as we can tell from the driver."""
    methods = {name for name in dir(redis.Redis) if not name.startswith("_")}
    words = {
        "cluster",
        "pubsub",
        "script",
        "sentinel",
        "evalsha",
        "wait",
        "info",
        "spublish",
        "ssubscribe",
        "subscribe",
    }
    return ({*methods, "del"} | words) - {"close", "strip", "get_message", "keys", "append"}


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.parametrize("kind", ["valkey", "redis62"])
def test_a_user_with_the_documented_rules_leads_stands_by_hands_over_and_runs(
    scene: Scene, start_redis: Callable[..., RedisServer], kind: str, tmp_path: Path
) -> None:
    server = start_redis(kind)
    listed, _ = rules()
    given = [rule.replace("leaderbeat:proj", scene.prefix) for rule in listed]
    admin = server.client()
    admin.execute_command("ACL", "SETUSER", "leaderbeat", *given)
    conf = {"leaderbeat_redis_url": f"redis://leaderbeat:password@127.0.0.1:{server.port}/2"}
    beats = [scene.start_beat(conf=conf) for _ in range(2)]
    workers = [scene.start_worker(conf=conf) for _ in range(1)]
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run")
    stage = Stage(scene, server)
    first = leader(stage, PATIENCE)
    first.terminate()
    assert first.wait(PATIENCE)["StatusCode"] == 0
    leader(stage, 10, other_than=first)
    sent = len(scene.beat_publishes())
    wait_for(lambda: len(scene.beat_publishes()) > sent, PATIENCE, "another goes on")
    for process in (*beats, *workers):
        assert not process.find(re.compile("WARNING|NOPERM|no permissions|Traceback")), process.tail()
    # Refused was at most what the driver can do without, and the warnings at the start.
    refused = {entry["object"] for entry in map(_named, admin.execute_command("ACL", "LOG", 100))}
    assert refused <= {"client|setinfo", "client|setname", "client", "info", "hello"}, refused


def _named(entry: object) -> dict[str, str]:
    if isinstance(entry, dict):
        return entry
    assert isinstance(entry, list)
    return dict(zip(entry[::2], entry[1::2], strict=True))


class Stage:
    """The scene, with its lease in another place."""

    def __init__(self, scene: Scene, server: RedisServer) -> None:
        self._scene = scene
        self._client = server.client(2)
        self.beats = scene.beats

    def lease(self) -> object:
        import json
        from types import SimpleNamespace

        value = self._client.get(self._scene.key("lease"))
        return SimpleNamespace(**json.loads(value)) if value else None
