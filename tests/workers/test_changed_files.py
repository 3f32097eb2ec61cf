"""Checkpoints and adapters whose files change before or during a load."""

import os
from pathlib import Path

import pytest

from rollbus.schemas.errors import ControlCode, ControlError, ErrorCode
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.workers.control_support import load_lora, rig, update

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
        assert end is not None
        assert end.error is not None
        assert end.error.code is ErrorCode.WORKER_FENCED

        await worker.weights.update(update(worker.checkpoint("3", 3), 3, mode="wait"), worker.report)
        await worker.flow.resume()
        assert worker.standing == (3, False)
        await worker.generate("s")


def rewrite(folder: Path) -> None:
    """Write an adapter of the same size with other content."""
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    os.utime(file, ns=(0, 0))


async def test_an_adapter_that_changes_before_its_load_is_not_loaded(tmp_path: Path) -> None:
    """If an adapter changes before its load, the loaded adapter of that name remains.

    After a new check, the new content is loaded.
    """
    async with rig(tmp_path) as worker:
        await worker.loras.load(load_lora("a", worker.adapter("1", 1), 1), worker.report)
        path = worker.adapter("2", 2)

        def report(stage: str) -> None:
            if stage == "loading":
                rewrite(path)

        with pytest.raises(ControlError, match=f"files of {path} were changed: stage its source again") as caught:
            await worker.loras.load(load_lora("a", path, 2), report)
        assert caught.value.code is ControlCode.STORAGE
        assert worker.links.versions.loras == {"a": 1}
        assert worker.engine.loras == {"a": 1}

        await worker.loras.load(load_lora("a", path, 2), worker.report)
        assert worker.links.versions.loras == {"a": 2}


@pytest.mark.parametrize("keeps", [False, True])
async def test_an_adapter_that_changes_during_its_load_serves_no_request(tmp_path: Path, keeps: bool) -> None:
    """If an adapter changes during its load, no request can use it, also if the engine fails to unload it.

    The content that the engine read is unknown.
    """

    class Disturbed(SyntheticEngine):
        async def load_lora(self, name: str, path: Path, version: int) -> None:
            """Load, while another program writes to the folder of version 2."""
            await super().load_lora(name, path, version)
            if path.name == "2":
                rewrite(path)
                self.faults = SyntheticFaults(unload_lora=keeps)

    async with rig(tmp_path, engine=Disturbed) as worker:
        await worker.loras.load(load_lora("a", worker.adapter("1", 1), 2), worker.report)
        await worker.flow.resume()
        await worker.start("r", LONG, lora="a")
        await worker.until_tokens("r", 5)
        path = worker.adapter("2", 2)
        with pytest.raises(ControlError, match=f"{path}.* changed during the load") as caught:
            await worker.loras.load(load_lora("a", path, 2), worker.report)
        assert caught.value.code is ControlCode.STORAGE
        assert worker.links.versions.loras == {}
        assert worker.engine.loras == ({"a": 2} if keeps else {})
        assert worker.standing == (1, False)
        end = worker.end("r")
        assert end is not None
        assert end.error is not None
        assert end.error.code is ErrorCode.WORKER_FENCED

        worker.engine.faults = SyntheticFaults()
        await worker.loras.load(load_lora("a", worker.adapter("3", 3), 3), worker.report)
        assert worker.links.versions.loras == {"a": 3}
