"""New weights through the real command line: the versions of tokens, and failures."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.cli.exits import ExitCode
from rollbus.schemas.presence import WorkerState
from tests.cli.support import run_rollbus
from tests.control.support import ask, assert_same, folders, serving_here, start_here
from tests.support.fleet import until_worker
from tests.support.invariants import check_stream
from tests.support.requests import start_stream


@pytest.mark.proves("P16")
async def test_weights_change_while_requests_stream(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Streams on two workers finish, first with tokens of version 1 and then only with tokens of version 2.

    A third worker that starts later from the old weights serves version 2, with the results of a worker that was
    started on the new weights.
    """
    one, two = folders(tmp_path)
    async with serving_here(nats_url, fleet, one, 2, step_s=0.01) as rb:
        before = await rb.complete(ask())
        async with asyncio.TaskGroup() as tasks:
            streams = [await start_stream(tasks, rb, ask(i, max_tokens=800)) for i in range(6)]
            ended = await run_rollbus(
                nats_url, fleet, "update-weights", str(two), "--version", "2", "--mode", "keep", "--json"
            )
        after = await rb.complete(ask())
        async with start_here(nats_url, fleet, "w2", one):
            await rb.fleet.wait_for_workers(3)
            await run_rollbus(nats_url, fleet, "drain", "w0", "w1")
            late = await rb.complete(ask())
    async with serving_here(nats_url, f"{fleet}-fresh", two, 1) as other:
        fresh = await other.complete(ask())

    told = json.loads(ended.stdout)
    assert (ended.code, ended.stderr, told["complete"]) == (0, "", True)
    assert [(worker["worker"], worker["weight_version"]) for worker in told["workers"]] == [("w0", 2), ("w1", 2)]
    for stream in streams:
        check_stream(stream.chunks, stream.request)
        assert len(stream.versions) == 800
        assert set(stream.versions) == {1, 2}
        assert stream.versions == sorted(stream.versions)
    assert {*before.weight_versions.tolist()} == {1}
    assert {*after.weight_versions.tolist()} == {*late.weight_versions.tolist()} == {2}
    assert late.worker_ids == ("w2",)
    assert before.token_ids.tolist() != after.token_ids.tolist()
    assert_same(after, fresh)
    assert_same(late, fresh)


@pytest.mark.proves("P19")
async def test_an_engine_with_wrong_routing_after_an_update_serves_no_requests(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An engine that reports success but routes wrongly serves nothing: its canary differs from the others."""
    one, two = folders(tmp_path)
    lies: dict[str, Any] = {"faults": {"load": "wrong_experts", "good_loads": 1}}
    async with serving_here(nats_url, fleet, one, 2) as rb, start_here(nats_url, fleet, "w2", one, **lies):
        await rb.fleet.wait_for_workers(3)
        ended = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2", "--json")
        liar = await until_worker(rb, "w2", WorkerState.POISONED)

    told = {worker["worker"]: worker for worker in json.loads(ended.stdout)["workers"]}
    assert ended.code == ExitCode.PARTIAL
    assert [told[f"w{i}"]["result"] for i in range(3)] == ["applied", "applied", "failed"]
    assert told["w2"]["code"] == "not_verified"
    assert liar.last_error


async def test_uploaded_weights_and_adapters_need_no_shared_folder(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """With --upload, workers need no folder: they load the uploaded weights, also a worker that starts later."""
    one, two = folders(tmp_path / "theirs")
    mine = two.rename(tmp_path / "mine")
    async with serving_here(nats_url, fleet, one, 1) as rb:
        ended = await run_rollbus(nats_url, fleet, "update-weights", str(mine), "--version", "2", "--upload")
        first = await rb.complete(ask())
        async with start_here(nats_url, fleet, "w1", one):
            await rb.fleet.wait_for_workers(2)
            await run_rollbus(nats_url, fleet, "drain", "w0")
            second = await rb.complete(ask())

    # On a machine with a full disk, stderr contains a warning.
    assert ended.code == 0, ended.stderr
    assert {*first.weight_versions.tolist()} == {2}
    assert second.worker_ids == ("w1",)
    assert_same(first, second)
