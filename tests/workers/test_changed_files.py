"""Checkpoints and adapters whose files change before or during a load."""

import os
from pathlib import Path

import pytest

from rollbus.schemas.errors import ControlCode, ControlError, ErrorCode
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.workers.control_support import rig, update

LONG = 60_000
"""The tokens of a request that does not end by itself in a test."""


@pytest.mark.parametrize("change", ["rewritten", "deleted"])
async def test_files_that_change_during_a_load_poison_the_weights(tmp_path: Path, change: str) -> None:
    """Files that change during a load make the weights invalid, also if their size does not change.

    The content that the engine read is unknown. An undisturbed load makes the worker serve again.
    """

    class Disturbed(SyntheticEngine):
        async def load_weights(self, path: Path) -> None:
            """Load, while another program writes to the folder of version 2."""
            await super().load_weights(path)
            file = path / "model.safetensors"
            if path.name == "2" and change == "deleted":
                file.unlink()
            elif path.name == "2":
                file.write_bytes(file.read_bytes()[:-1] + b"?")
                os.utime(file, ns=(0, 0))  # a different time, whatever the resolution of the disk's clock

    config = SyntheticConfig(faults=SyntheticFaults(load_s=0.05))
    async with rig(tmp_path, config, engine=Disturbed) as worker:
        await worker.start("r", LONG)
        await worker.until_tokens("r", 5)
        path = worker.checkpoint("2", 2)
        with pytest.raises(ControlError, match=f"{path}.* changed during the load") as caught:
            await worker.weights.update(update(path, 2), worker.report)
        assert caught.value.code is ControlCode.HALF_WRITTEN
        assert (*worker.standing, worker.weights.problem) == (1, True, caught.value.message)
        end = worker.end("r")
        assert end.error.code is ErrorCode.WORKER_FENCED

        await worker.weights.update(update(worker.checkpoint("3", 3), 3, mode="wait"), worker.report)
        await worker.flow.resume()
        assert worker.standing == (3, False)
        await worker.generate("s")
