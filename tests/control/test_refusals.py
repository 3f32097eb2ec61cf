"""Rejected commands: each error states its cause, and nothing has changed afterwards."""

import shutil
from pathlib import Path

from rollbus.frontend.cli.exits import ExitCode
from rollbus.schemas.presence import WorkerState
from tests.cli.support import run_rollbus
from tests.control.support import folders, serving_here, write_adapter
from tests.support.fleet import all_serve, until_state


async def test_a_full_disk_fails_an_update_without_a_change(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """If a worker cannot write fetched weights into its cache, the command fails with `storage`.

    All workers serve as before.
    """
    root = tmp_path / "root"
    one, two = folders(root)
    full = tmp_path / "full"
    async with serving_here(nats_url, fleet, one, 1, fields={"cache_dir": str(full)}) as rb:
        # At its start, the worker checks that it can write here.
        shutil.rmtree(full, ignore_errors=True)
        full.write_text("a file where the cache's directory should be")
        ended = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2", "--upload")
        state = await until_state(rb, all_serve)

    assert ended.code == ExitCode.FAILED
    assert "storage" in ended.stderr
    assert [(worker.state, worker.weight_version) for worker in state.workers] == [(WorkerState.SERVING, 1)]
    # `desired` leaves out models without a recorded command, and a command that was undone leaves no register.
    assert [name for desired in state.desired.values() for name in desired.registers] == []


async def test_an_engine_on_several_machines_rejects_sources_in_the_store(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An engine on several machines rejects weights and adapters from the object store with the reason.

    The fetched files would exist on the worker's machine only.
    """
    root = tmp_path / "root"
    one, two = folders(root)
    adapter = write_adapter(root / "adapter")
    async with serving_here(nats_url, fleet, one, 1, weight_deltas=False) as rb:
        for command in (("update-weights", str(two), "--version", "2"), ("load-lora", "math", str(adapter))):
            ended = await run_rollbus(nats_url, fleet, *command, "--upload")
            assert ended.code == ExitCode.FAILED
            assert "fetched files are only on the worker's machine" in ended.stderr
        state = await until_state(rb, all_serve)
        assert [(worker.weight_version, worker.loras) for worker in state.workers] == [(1, ())]

        shared = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2")
        assert shared.code == 0
