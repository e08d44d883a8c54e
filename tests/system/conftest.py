"""pytest-celery's fixtures, over local processes.

A test says what it wants by markers (`schedule`, `conf`, `beats`, `workers`, `matrix`; see pyproject.toml)
and takes `celery_setup`. It runs for each ledger and broker of the matrix. All but RabbitMQ is started for
the test alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryWorkerCluster,
)

from celery_leaderbeat.ledger import Ledger
from tests.support.certificates import Certificates, make_certificates
from tests.support.containers import (
    BeatCluster,
    BeatContainer,
    LeaderbeatSetup,
    LocalRabbitMQContainer,
    LocalRedisContainer,
    LocalWorkerContainer,
    WorkerNode,
)
from tests.support.scene import MATRIX, Scene
from tests.support.servers import RedisServer
from tests.support.turns import away_from_slots, periods_of

#: Set by `make test-long`.
EXHAUSTIVE = os.environ.get("LEADERBEAT_EXHAUSTIVE", "").lower() in ("1", "true", "yes")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what needs a scene on each combination that its `matrix` marker names, by default on all."""
    if "scene_kinds" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("matrix")
        names = marker.args if marker else tuple(MATRIX)
        if marker and EXHAUSTIVE:
            names += marker.kwargs.get("long", ())
        metafunc.parametrize("scene_kinds", [MATRIX[name] for name in names], ids=names, indirect=True)


def _marked(request: pytest.FixtureRequest, name: str, count: int) -> tuple[int, dict[str, Any]]:
    marker = request.node.get_closest_marker(name)
    if marker is None:
        return count, {}
    options = dict(marker.kwargs)
    return (marker.args[0] if marker.args else options.pop("count", count)), options


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Made once: nobody changes them."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def scene_kinds(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kinds of the ledger and of the broker."""
    return request.param


@pytest.fixture
def scene(
    request: pytest.FixtureRequest,
    scene_kinds: tuple[str, str],
    start_redis: Callable[..., RedisServer],
    tmp_path: Path,
) -> Iterator[Scene]:
    """The stage of the test, without any beat or worker: `start_beat`, `start_worker`.

    Slots that are a minute or more apart aren't close when the test begins.
    """
    ledger_kind, broker_kind = scene_kinds
    rabbit = request.getfixturevalue("rabbitmq") if broker_kind == "rabbitmq" else None
    marked = request.node.get_closest_marker("schedule")
    schedule = marked.args[0] if marked else {}
    conf: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("conf"))):
        conf.update(marker.kwargs)
    scene = Scene(
        tmp_path,
        start_redis(ledger_kind),
        rabbit,
        schedule=schedule,
        conf=conf,
    )
    away_from_slots(periods_of(schedule))
    yield scene
    scene.close()


@pytest.fixture
def celery_broker_cluster(scene: Scene) -> CeleryBrokerCluster:
    """The broker: the ledger's server, or a virtual host of the RabbitMQ."""
    container = (
        LocalRabbitMQContainer(scene.rabbit, scene.vhost)
        if scene.rabbit
        else LocalRedisContainer(scene.ledger, scene.BROKER_DB)
    )
    return CeleryBrokerCluster(CeleryTestBroker(container))


@pytest.fixture
def celery_backend_cluster(scene: Scene) -> CeleryBackendCluster:
    """The result backend: another database of the ledger's server."""
    return CeleryBackendCluster(CeleryTestBackend(LocalRedisContainer(scene.ledger, scene.BACKEND_DB)))


@pytest.fixture
def default_worker_container_cls() -> type[LocalWorkerContainer]:
    """A worker that is a local process."""
    return LocalWorkerContainer


@pytest.fixture
def default_worker_env(scene: Scene) -> dict[str, str | None]:
    """The project's environment, in place of an image's."""
    return scene.env()


@pytest.fixture
def celery_worker_cluster(
    request: pytest.FixtureRequest,
    scene: Scene,
    celery_setup_app: Celery,
    default_worker_container_cls: type[LocalWorkerContainer],
) -> CeleryWorkerCluster | None:
    """As many workers as the `workers` marker says (1), not waited for; None for 0."""
    count, options = _marked(request, "workers", 1)
    processes = [scene.start_worker(**{**options, "wait": False}) for _ in range(count)]
    nodes = [WorkerNode(default_worker_container_cls(process), celery_setup_app) for process in processes]
    return CeleryWorkerCluster(*nodes) if nodes else None


@pytest.fixture
def default_worker_container(celery_worker_cluster: CeleryWorkerCluster) -> LocalWorkerContainer:
    """The first worker."""
    return celery_worker_cluster[0].container


@pytest.fixture
def beat_cluster(request: pytest.FixtureRequest, scene: Scene) -> BeatCluster | None:
    """As many beats as the `beats` marker says (3), started together and not waited for; None for 0."""
    count, options = _marked(request, "beats", 3)
    processes = [scene.start_beat(**{**options, "wait": False}) for _ in range(count)]
    return BeatCluster(*(BeatContainer(process) for process in processes)) if processes else None


@pytest.fixture
def celery_setup_cls(
    request: pytest.FixtureRequest, scene: Scene, beat_cluster: BeatCluster | None
) -> type[LeaderbeatSetup]:
    """The setup class of this test, which knows its scene and its beats."""
    wait = _marked(request, "beats", 3)[1].get("wait", True)
    members = {"scene": scene, "beat_cluster": beat_cluster, "wait_for_start": wait}
    return type("LeaderbeatSetup", (LeaderbeatSetup,), members)


@pytest.fixture
def celery_setup_app(
    celery_setup_cls: type[LeaderbeatSetup], celery_setup_config: dict[str, Any], celery_setup_name: str
) -> Iterator[Celery]:
    """The test process's own app, closed after the test."""
    app = celery_setup_cls.create_setup_app(celery_setup_config, celery_setup_name)
    yield app
    with contextlib.suppress(Exception):
        app.backend.result_consumer.stop()
    with contextlib.suppress(Exception):
        app.backend.client.connection_pool.disconnect()
    app.close()


@pytest.fixture
def ledger(scene: Scene) -> Iterator[Ledger]:
    """The scene's ledger, as an operator's process has it."""
    app = Celery("project", broker=scene.broker_url, set_as_current=False)
    app.conf.leaderbeat_redis_url = scene.ledger_url
    ledger = Ledger.for_app(app)
    yield ledger
    ledger.close()
    app.close()
