"""The stages `updates` and `survival` on real engines on a CPU.

`make test-prove` runs this test. It starts four engines, so `make test` skips it.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollbus.frontend.cli.prove.survival import Survival
from rollbus.frontend.cli.prove.updates import Updates
from tests.prove.stages_support import found, run_stages
from tests.support.real_fleet import RealWorkers

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("unhurried"),
    pytest.mark.skipif("ROLLBUS_TEST_PROVE" not in os.environ, reason="starts four engines; make test-prove runs it"),
]


async def test_updates_and_a_kill_of_real_engines_are_ok(nats_url: str, tiny_moe_float32: Path, tmp_path: Path) -> None:
    """Changed weights by path and as a delta answer as a fresh worker, and a killed worker's streams are resumed.

    What a CPU cannot do is `not run`, with the reason.
    """

    @contextlib.asynccontextmanager
    async def start(model: Path, num_workers: int) -> AsyncIterator[tuple[str, str]]:
        workers = RealWorkers(nats_url, model, version=1, cache=tmp_path / "cache")
        workers.served_name = tiny_moe_float32.name
        try:
            await workers.have(num_workers)
            yield nats_url, workers.fleet
        finally:
            await asyncio.to_thread(workers.stop)

    scratch = tiny_moe_float32.parent / "prove"
    scratch.mkdir()

    updates, survival = await run_stages([Updates(), Survival()], start, tiny_moe_float32, scratch, num_workers=2)

    for way in ("by path: ", "by path, and back: ", "by delta: ", "by delta, and back: ", "version cut: "):
        verdict, text = found(updates, way)
        assert verdict == "ok", text
    verdict, text = found(survival, "kill -9 in mid-stream")
    assert verdict == "ok", text
    assert found(survival, "sleep: ")[0] == found(survival, "adapter: ")[0] == "not run"
