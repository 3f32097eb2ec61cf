"""A checkpoint in a folder whose files somebody changes while an engine loads them."""

import os
from pathlib import Path

import pytest

from rollbus.schemas.errors import ControlCode, ControlError, ErrorCode
from rollbus.workers.engines.synthetic import SyntheticConfig, SyntheticEngine, SyntheticFaults
from tests.workers.control_support import rig, update

LONG = 60_000
"""Tokens: a request that does not end by itself in a test."""


@pytest.mark.parametrize("change", ["rewritten", "deleted"])
async def test_files_that_change_while_they_are_loaded_poison(tmp_path: Path, change: str) -> None:
    """Of the same size too: nobody knows what the engine has read. The worker is fit again after a load in peace."""

    class Disturbed(SyntheticEngine):
        async def load_weights(self, path: Path) -> None:
            """Load, while somebody else writes to the folder of version 2."""
            await super().load_weights(path)
            file = path / "model.safetensors"
            if path.name == "2" and change == "deleted":
                file.unlink()
            elif path.name == "2":
                file.write_bytes(file.read_bytes()[:-1] + b"?")
                os.utime(file, ns=(0, 0))  # a moment of its own, whatever the clock of the disk is like

    config = SyntheticConfig(faults=SyntheticFaults(load_s=0.05))
    async with rig(tmp_path, config, engine=Disturbed) as worker:
        await worker.start("r", LONG)
        await worker.until_tokens("r", 5)
        path = worker.checkpoint("2", 2)
        with pytest.raises(ControlError, match=f"files of {path} were changed while they were loaded") as caught:
            await worker.weights.update(update(path, 2), worker.report)
        assert caught.value.code is ControlCode.HALF_WRITTEN
        assert (*worker.standing, worker.weights.problem) == (1, True, caught.value.message)
        end = worker.end("r")
        assert end is not None
        assert end.error is not None
        assert end.error.code is ErrorCode.WORKER_FENCED

        await worker.weights.update(update(worker.checkpoint("3", 3), 3, mode="wait"), worker.report)
        await worker.flow.resume()
        assert worker.standing == (3, False)
        await worker.generate("s")
