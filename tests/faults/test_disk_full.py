"""A full disk of nats-server: clients, `doctor` and `status` name it and the remedy. Nothing else shows it."""

import asyncio
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbus
from rollbus import GenerateRequest, RequestTimeout, SamplingParams
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.doctor.host import Status
from rollbus.frontend.cli.doctor.server import DoctorTarget, examine_bus
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.cli.support import run_rollbus
from tests.support.fleet import StartServed, synthetic_worker
from tests.support.nats_server import require_binary
from tests.support.outcomes import error_of
from tests.support.patience import HANGS_AFTER_S
from tests.support.requests import short
from tests.support.waits import until_true

pytestmark = pytest.mark.slow
REMEDY = "free space on the disk of nats-server, then restart nats-server"
UNANSWERED_S = 9.0
"""Seconds in which a client repeats a request four times."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 20 MB. The test is skipped without the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "rollbus-test", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def long() -> GenerateRequest:
    """Return a request that is larger than a block of the disk."""
    return GenerateRequest(
        prompt_token_ids=range(10_000), sampling=SamplingParams(max_tokens=3), timeout_s=UNANSWERED_S
    )


def fill(disk: Path) -> None:
    """Use all space of a file system."""
    with (disk / "fill").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(65_536)):
                pass
        except OSError as error:
            assert error.errno == 28


async def test_a_full_disk_is_named_with_the_restart_as_remedy(
    small_disk: Path, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The waiting request, the client's log, `doctor` and `status` name a full disk, even after space was freed."""
    require_binary()
    caplog.set_level(logging.WARNING, "rollbus.bus.queue")
    async with (
        EmbeddedServer(store_dir=small_disk / "js") as server,
        synthetic_worker(server.url, fleet, config=SyntheticConfig(max_model_len=20_000)),
        rollbus.connect(server.url, fleet=fleet, placement=False) as rb,
        asyncio.timeout(HANGS_AFTER_S),
    ):
        await rb.fleet.wait_for_workers()
        await rb.complete(short("before"))
        healthy = await rb.fleet.check_queues()
        fill(small_disk)
        error = await error_of(rb.complete(long()), RequestTimeout)
        (small_disk / "fill").unlink()
        target = DoctorTarget(url=server.url, creds=None, fleet=fleet)
        findings = {finding.check: finding async for finding in examine_bus(target)}
        status = await run_rollbus(server.url, fleet, "status")

    assert healthy == {}
    assert REMEDY in error.message
    logged = [line for line in caplog.messages if line.startswith("queue.unanswered")]
    assert [line.split(" rounds=")[1].split()[0] for line in logged[:3]] == ["1", "2", "4"]
    assert all(REMEDY in line for line in logged)
    finding = findings["queue of synthetic"]
    assert (finding.status, finding.advice) == (Status.FAIL, f"if this lasts, {REMEDY}")
    assert REMEDY in " ".join(status.stdout.split())


async def test_probes_leave_nothing_in_a_queue(
    nats_url: str, fleet: str, one_worker: StartServed, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker removes a probe without a log line and without counting it as a request."""
    async with one_worker(options={"placement": False}) as (rb, worker, _):
        assert await rb.fleet.check_queues() == {}
        await until_true(lambda: worker._puller.stats.probes == 2)
        state = await rb.fleet.state()

    assert [depth.waiting + depth.in_hand for depth in state.queues] == [0, 0, 0, 0]
    assert worker.stats().intake.taken == worker.stats().intake.bad == 0
    assert not [line for line in caplog.messages if "rejected" in line]
