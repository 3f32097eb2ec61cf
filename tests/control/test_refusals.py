"""Rejected commands: each error states its cause, and nothing has changed afterwards."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from rollbus import FleetState
from rollbus.bus.nats.connection import publish, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.frontend.cli.exits import ExitCode
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import Pause
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.messages import decode_ack, encode_json
from rollbus.schemas.presence import WorkerState
from tests.cli.support import run_rollbus
from tests.control.support import ask, assert_same, folders, serving, write_adapter, write_checkpoint
from tests.support.connections import opened
from tests.support.fleet_states import all_serve, until_state
from tests.support.worker_process import LASTING

pytestmark = pytest.mark.slow

MakeSource = Callable[[Path, Path], Path]
"""A function from the allowed root and a folder beside it to the source that a command names."""


def outside(_root: Path, beside: Path) -> Path:
    """Write a valid checkpoint in a folder that is not allowed."""
    return write_checkpoint(beside / "good", seed=3)


def up_and_out(root: Path, beside: Path) -> Path:
    """Write a valid checkpoint in a folder that is not allowed, and return a path to it with `..`."""
    write_checkpoint(beside / "good", seed=3)
    return root / ".." / beside.name / "good"


def linked_out(root: Path, beside: Path) -> Path:
    """Write a link in the root that points out of it."""
    (root / "link").symlink_to(write_checkpoint(beside / "good", seed=3))
    return root / "link"


def truncated(root: Path, _beside: Path) -> Path:
    """Write a checkpoint with a shard that lacks its last byte."""
    folder = write_checkpoint(root / "truncated", seed=3)
    shard = folder / "model-2.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    return folder


def incomplete(root: Path, _beside: Path) -> Path:
    """Write a checkpoint that lacks a shard."""
    folder = write_checkpoint(root / "incomplete", seed=3)
    (folder / "model-2.safetensors").unlink()
    return folder


def misshapen(root: Path, _beside: Path) -> Path:
    """Write a checkpoint with tensors of other shapes."""
    return write_checkpoint(root / "misshapen", seed=3, shape=(8, 5))


def absent(root: Path, _beside: Path) -> Path:
    """Return a path at which no file exists."""
    return root / "absent"


def foreign_adapter(root: Path, _beside: Path) -> Path:
    """Write an adapter for a module that the model does not have."""
    return write_adapter(root / "foreign", module="model.layers.7.self_attn.q_proj")


def adapter_outside(_root: Path, beside: Path) -> Path:
    """Write a valid adapter in a folder that is not allowed."""
    return write_adapter(beside / "adapter")


def standing(state: FleetState) -> object:
    """Return all parts of the fleet's state that a rejected command must not change."""
    workers = [
        (worker.worker, worker.incarnation, worker.state, worker.weight_version, worker.target_version, worker.loras)
        for worker in state.workers
    ]
    # A command that was recorded and then undone leaves only an epoch.
    desired = {
        model: [(name, it.command) for name, it in told.registers.items()] for model, told in state.desired.items()
    }
    return workers, desired


@contextlib.asynccontextmanager
async def unchanged(nats_url: str, fleet: str, tmp_path: Path, *commands: str) -> AsyncIterator[tuple[Path, Path]]:
    """Run two workers with weights of version 2, and check at the end that nothing has changed.

    Yields the root of the workers and a folder beside it. `commands` run after the update and before the block.
    """
    root, beside = tmp_path / "root", tmp_path / "beside"
    one, two = folders(root)
    beside.mkdir()
    async with serving(nats_url, fleet, one, 2, options=LASTING) as (rb, _):
        ready = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2")
        assert ready.code == 0, ready
        for command in commands:
            assert (await run_rollbus(nats_url, fleet, command)).code == 0
        # The presence of workers shows the last command's change a little later than its ack.
        ready_state = await until_state(
            rb, lambda state: all_serve(state) and {worker.weight_version for worker in state.workers} == {2}
        )
        result, state = await rb.complete(ask()), standing(ready_state)

        yield root, beside

        assert standing(await rb.fleet.state()) == state
        assert_same(await rb.complete(ask()), result)


SOURCES: list[tuple[str, MakeSource, str]] = [
    ("update-weights", outside, "path_refused"),
    ("update-weights", up_and_out, "path_refused"),
    ("update-weights", linked_out, "path_refused"),
    ("update-weights", truncated, "bad_source"),
    ("update-weights", incomplete, "bad_source"),
    ("update-weights", misshapen, "bad_source"),
    ("update-weights", absent, "absent"),
    ("load-lora", foreign_adapter, "bad_source"),
    ("load-lora", adapter_outside, "path_refused"),
    ("load-lora", outside, "path_refused"),
]
NAMED: dict[MakeSource, str] = {
    truncated: "model-2.safetensors",
    incomplete: "model-2.safetensors",
    misshapen: "[8, 5]",
}
"""The text that the error message must contain."""


@pytest.mark.proves("P22")
async def test_all_workers_reject_an_invalid_source_without_a_change(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A command with an invalid source exits with 1, and both workers state the reason.

    Invalid are paths outside of the roots, also by `..` or a link, and truncated or incomplete shards, other shapes and
    adapters of another base. Versions, desired state, adapters and results of the weights do not change.
    """
    async with unchanged(nats_url, fleet, tmp_path) as (root, beside):
        for i, (command, make, code) in enumerate(SOURCES):
            (beside / str(i)).mkdir()
            source = make(root, beside / str(i))
            args = ("math", str(source)) if command == "load-lora" else (str(source), "--version", "3")
            ended = await run_rollbus(nats_url, fleet, command, *args)

            assert ended.code == ExitCode.FAILED, (make, ended)
            assert sum(line.startswith("failed  ") for line in ended.stdout.splitlines()) == 2, (make, ended)
            why = ended.stderr.splitlines()[-1]
            assert why.startswith("rollbus: "), (make, ended)
            assert code in why, (make, ended)
            assert NAMED.get(make, "") in why, (make, ended)


async def test_a_version_that_is_not_newer_is_refused(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """An older version, and the same version from another source, are rejected before any worker gets the command."""
    async with unchanged(nats_url, fleet, tmp_path) as (root, _):
        for version in ("1", "2"):
            ended = await run_rollbus(nats_url, fleet, "update-weights", str(root / "one"), "--version", version)
            assert (ended.code, "old_version" in ended.stderr) == (ExitCode.FAILED, True), ended


async def test_a_command_for_an_unknown_model_or_worker_is_rejected(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """An unknown model or worker is a usage error that names it. An empty fleet is exit code 5."""
    update = ("update-weights", str(tmp_path / "root" / "one"), "--version", "3")
    async with unchanged(nats_url, fleet, tmp_path):
        for args in (("--model", "other"), ("--worker", "w0", "--worker", "w9")):
            for command in (("pause",), update):
                ended = await run_rollbus(nats_url, fleet, *command, *args)

                assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (ExitCode.USAGE, "", 1), ended
                assert args[-1] in ended.stderr
        for command in (("pause",), update):
            ended = await run_rollbus(nats_url, f"{fleet}-empty", *command)

            assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (ExitCode.NO_WORKERS, "", 1), ended


async def final(acks: asyncio.Queue[Ack]) -> Ack:
    """Return the next final ack."""
    while not (ack := await acks.get()).status.is_final:
        pass
    return ack


@pytest.mark.proves("P75")
async def test_a_stale_command_is_refused(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Every worker answers `stale` to a command whose epoch is older than the recorded one, and does not apply it."""
    subjects = Subjects(fleet)
    acks: asyncio.Queue[Ack] = asyncio.Queue(100)

    async def take(message: Msg) -> None:
        acks.put_nowait(decode_ack(message.data))

    async with unchanged(nats_url, fleet, tmp_path, "pause", "resume"), opened(nats_url) as connection:
        await subscribe(connection, subjects.acks_to("admin"), take)
        await connection.flush()
        await publish(connection, subjects.control("admin"), encode_json(Pause(model="m", epoch=2)))
        answers = [await final(acks) for _ in range(2)]

    assert {ack.worker for ack in answers} == {"w0", "w1"}
    for ack in answers:
        assert ack.status is AckStatus.STALE
        assert ack.error is not None
        assert ack.error.code is ControlCode.STALE
        assert ack.error.message


async def test_a_full_disk_fails_an_update_without_a_change(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """If a worker cannot write fetched weights into its cache, the command fails with `storage`.

    All workers serve as before.
    """
    root = tmp_path / "root"
    one, two = folders(root)
    full = tmp_path / "full"
    async with serving(nats_url, fleet, one, 1, options=(*LASTING, "--cache-dir", str(full))) as (rb, _):
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
    async with serving(nats_url, fleet, one, 1, options=LASTING, weight_deltas=False) as (rb, _):
        for command in (("update-weights", str(two), "--version", "2"), ("load-lora", "math", str(adapter))):
            ended = await run_rollbus(nats_url, fleet, *command, "--upload")
            assert ended.code == ExitCode.FAILED
            assert "fetched files are only on the worker's machine" in ended.stderr
        state = await until_state(rb, all_serve)
        assert [(worker.weight_version, worker.loras) for worker in state.workers] == [(1, ())]

        shared = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2")
        assert shared.code == 0
