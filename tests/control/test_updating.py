"""New weights through the real command line, on worker processes: the versions of tokens, and failures."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import rollbus
from rollbus.frontend.cli.exits import ExitCode
from rollbus.schemas.presence import WorkerState
from tests.cli.support import run_rollbus
from tests.control.support import ask, assert_same, folders, serving, start
from tests.support.fleet_states import all_serve, until_state, until_worker, worker_of
from tests.support.invariants import check_stream
from tests.support.streams import start_stream

pytestmark = pytest.mark.slow


@pytest.mark.proves("P16")
async def test_weights_change_while_requests_stream(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Streams on two workers finish, first with tokens of version 1 and then only with tokens of version 2.

    A third worker that starts later from the old weights serves version 2, with the results of a worker that was
    started on the new weights.
    """
    one, two = folders(tmp_path)
    async with serving(nats_url, fleet, one, 2, step_s=0.01) as (rb, _):
        before = await rb.complete(ask())
        async with asyncio.TaskGroup() as tasks:
            streams = [await start_stream(tasks, rb, ask(i, max_tokens=800)) for i in range(6)]
            ended = await run_rollbus(
                nats_url, fleet, "update-weights", str(two), "--version", "2", "--mode", "keep", "--json"
            )
        after = await rb.complete(ask())
        async with start(nats_url, fleet, "w2", one):
            await rb.fleet.wait_for_workers(3)
            await run_rollbus(nats_url, fleet, "drain", "w0", "w1")
            late = await rb.complete(ask())
    async with start(nats_url, f"{fleet}-fresh", "w0", two), rollbus.connect(nats_url, fleet=f"{fleet}-fresh") as other:
        await other.fleet.wait_for_workers()
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


async def test_a_worker_killed_during_the_update_is_named(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """The command exits with 3, and the ledger names the killed worker as missing.

    The other worker announces and serves version 2. The killed worker loads version 2 after its restart.
    """
    one, two = folders(tmp_path)
    slow: dict[str, Any] = {"faults": {"load_s": 2.0}}
    async with serving(nats_url, fleet, one, 2, **slow) as (rb, [_, victim]), asyncio.TaskGroup() as tasks:
        update = tasks.create_task(run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2", "--json"))
        await until_worker(rb, "w1", WorkerState.UPDATING)
        victim.kill()
        ended = await update
        await until_worker(rb, "w0", lambda worker: worker.weight_version == 2 and worker.state is WorkerState.SERVING)
        state = await rb.fleet.state()
        result = await rb.complete(ask())
        async with start(nats_url, fleet, "w1", one, **slow):
            again = await until_worker(rb, "w1", WorkerState.SERVING)

    told = {worker["worker"]: worker for worker in json.loads(ended.stdout)["workers"]}
    assert (ended.code, told["w0"]["result"], told["w1"]["result"]) == (ExitCode.PARTIAL, "applied", "missing")
    assert "w1 is missing" in ended.stderr
    [survivor] = [worker for worker in state.workers if worker.state is WorkerState.SERVING]
    assert (survivor.worker, survivor.weight_version, survivor.target_version) == ("w0", 2, 2)
    assert {*result.weight_versions.tolist()} == {2}
    assert (again.weight_version, again.target_version) == (2, 2)


async def test_the_record_of_an_update_stays_valid_if_the_only_worker_is_killed(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """If the only worker is killed during the update, the command exits with 4.

    The record remains valid: the worker has version 2 after its restart.
    """
    one, two = folders(tmp_path)
    slow: dict[str, Any] = {"faults": {"load_s": 2.0}}
    async with serving(nats_url, fleet, one, 1, **slow) as (rb, [process]), asyncio.TaskGroup() as tasks:
        update = tasks.create_task(run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2"))
        await until_worker(rb, "w0", WorkerState.UPDATING)
        process.kill()
        ended = await update
        async with start(nats_url, fleet, "w0", one):
            again = await until_worker(rb, "w0", WorkerState.SERVING)

    assert ended.code == ExitCode.TIMEOUT
    assert ended.stdout.splitlines()[1].split()[:2] == ["missing", "w0"]
    assert "w0 is missing" in ended.stderr
    assert again.weight_version == 2


@pytest.mark.proves("P79")
@pytest.mark.parametrize(
    ("fault", "code", "state"),
    [
        ("half_written", "half_written", WorkerState.POISONED),
        ("refused", "engine_error", WorkerState.OUTDATED),
    ],
)
async def test_a_worker_that_cannot_load_serves_no_requests(
    fault: str, code: str, state: WorkerState, nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A worker that cannot load keeps its version, reports the reason and accepts nothing.

    The exit code is 3, and the other worker serves. A restart makes the failed worker serve the new version.
    """
    one, two = folders(tmp_path)
    fails: dict[str, Any] = {"faults": {"load": fault, "good_loads": 1}}  # the first load is that of the start
    async with serving(nats_url, fleet, one, 1) as (rb, _):
        async with start(nats_url, fleet, "w1", one, **fails):
            await rb.fleet.wait_for_workers(2)
            ended = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2", "--json")
            failed = await until_worker(rb, "w1", state)
            shown = await run_rollbus(nats_url, fleet, "status")
            results = [await rb.complete(ask(i)) for i in range(8)]
        async with start(nats_url, fleet, "w1", one):
            back = await until_worker(rb, "w1", WorkerState.SERVING)

    told = {worker["worker"]: worker for worker in json.loads(ended.stdout)["workers"]}
    assert ended.code == ExitCode.PARTIAL
    assert (told["w0"]["result"], told["w1"]["result"], told["w1"]["code"]) == ("applied", "failed", code)
    assert (failed.state, failed.weight_version, failed.target_version, failed.free_slots) == (state, 1, 2, 0)
    assert failed.last_error
    assert failed.last_error in " ".join(shown.stdout.split())
    assert state in shown.stdout
    assert {worker for result in results for worker in result.worker_ids} == {"w0"}
    assert back.weight_version == 2


@pytest.mark.proves("P19")
async def test_an_engine_with_wrong_routing_after_an_update_serves_no_requests(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An engine that reports success but routes wrongly serves nothing: its canary differs from the others."""
    one, two = folders(tmp_path)
    lies: dict[str, Any] = {"faults": {"load": "wrong_experts", "good_loads": 1}}
    async with serving(nats_url, fleet, one, 2) as (rb, _), start(nats_url, fleet, "w2", one, **lies):
        await rb.fleet.wait_for_workers(3)
        ended = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2", "--json")
        liar = await until_worker(rb, "w2", WorkerState.POISONED)

    told = {worker["worker"]: worker for worker in json.loads(ended.stdout)["workers"]}
    assert ended.code == ExitCode.PARTIAL
    assert [told[f"w{i}"]["result"] for i in range(3)] == ["applied", "applied", "failed"]
    assert told["w2"]["code"] == "not_verified"
    assert liar.last_error


async def test_the_desired_state_is_restored_if_all_workers_fail(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """If all workers fail, the command exits with 1 and an error line, and the desired state is restored.

    The desired state contains no weights, so all workers stay at their version.
    """
    one, two = folders(tmp_path)
    fails: dict[str, Any] = {"faults": {"load": "refused", "good_loads": 1}}
    async with serving(nats_url, fleet, one, 2, **fails) as (rb, _):
        ended = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2")
        state = await until_state(rb, all_serve)
        result = await rb.complete(ask())

    assert ended.code == ExitCode.FAILED
    assert ended.stderr.startswith("rollbus: update_weights was applied by 0 of 2 workers")
    assert ended.stderr.endswith("was restored.\n")
    assert "weights" not in state.desired["m"].registers
    assert [worker.weight_version for worker in state.workers] == [1, 1]
    assert {*result.weight_versions.tolist()} == {1}


async def test_workers_return_to_their_start_weights_if_the_first_update_fails(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """If all workers load unexpected weights and no weights were desired before, they return to their start weights."""
    one, two = folders(tmp_path)
    path = tmp_path / "canary.json"
    async with serving(nats_url, f"{fleet}-other", two, 1):
        told = await run_rollbus(nats_url, f"{fleet}-other", "update-weights", str(two), "--version", "2", "--json")
    path.write_text(json.dumps(json.loads(told.stdout)["workers"][0]["canary"]))
    async with serving(nats_url, fleet, one, 2) as (rb, _):
        before = await rb.complete(ask())
        update = ("update-weights", str(one), "--version", "2", "--expected-canary", str(path))
        ended = await run_rollbus(nats_url, fleet, *update)
        state = await until_state(rb, all_serve)
        after = await rb.complete(ask())

    assert ended.code == ExitCode.FAILED
    assert "not_verified" in ended.stderr
    assert [(worker.weight_version, worker.target_version) for worker in state.workers] == [(1, 1), (1, 1)]
    assert {*after.weight_versions.tolist()} == {1}
    assert_same(after, before)


async def test_an_older_version_needs_allow_rollback(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A worker rejects an older version without a change, unless the command has --allow-rollback.

    With it, the worker returns to the earlier results.
    """
    one, two = folders(tmp_path)
    async with serving(nats_url, fleet, one, 1) as (rb, _):
        before = await rb.complete(ask())
        first = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2")
        refused = await run_rollbus(nats_url, fleet, "update-weights", str(one), "--version", "1")
        still = worker_of(await rb.fleet.state(), "w0")
        allowed = await run_rollbus(nats_url, fleet, "update-weights", str(one), "--version", "1", "--allow-rollback")
        after = await rb.complete(ask())

    assert (first.code, refused.code, allowed.code) == (0, ExitCode.FAILED, 0)
    assert "old_version" in refused.stderr
    assert (still.state, still.weight_version, still.target_version) == (WorkerState.SERVING, 2, 2)
    assert_same(after, before)


async def test_weights_must_give_the_expected_canary(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """With the canary of --json as --expected-canary, the same weights pass and other weights fail as not verified.

    The only worker then returns to the version before.
    """
    one, two = folders(tmp_path)
    path = tmp_path / "canary.json"
    async with serving(nats_url, fleet, one, 1) as (rb, _):
        first = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2", "--json")
        path.write_text(json.dumps(json.loads(first.stdout)["workers"][0]["canary"]))
        expect = ("--expected-canary", str(path))
        await run_rollbus(nats_url, fleet, "update-weights", str(one), "--version", "3")
        same = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "4", *expect)
        other = await run_rollbus(nats_url, fleet, "update-weights", str(one), "--version", "5", *expect)
        state = await until_worker(rb, "w0", WorkerState.SERVING)

    assert (same.code, same.stderr) == (0, "")
    assert other.code == ExitCode.FAILED
    assert "not_verified" in other.stderr
    assert (state.weight_version, state.target_version) == (4, 4)


async def test_uploaded_weights_and_adapters_need_no_shared_folder(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """With --upload, workers need no folder: they load the uploaded weights, also a worker that starts later."""
    one, two = folders(tmp_path / "theirs")
    mine = two.rename(tmp_path / "mine")
    async with serving(nats_url, fleet, one, 1) as (rb, _):
        ended = await run_rollbus(nats_url, fleet, "update-weights", str(mine), "--version", "2", "--upload")
        first = await rb.complete(ask())
        async with start(nats_url, fleet, "w1", one):
            await rb.fleet.wait_for_workers(2)
            await run_rollbus(nats_url, fleet, "drain", "w0")
            second = await rb.complete(ask())

    # On a machine with a full disk, stderr contains a warning.
    assert ended.code == 0, ended.stderr
    assert {*first.weight_versions.tolist()} == {2}
    assert second.worker_ids == ("w1",)
    assert_same(first, second)
