"""Pause, resume, drain and abort through the real command line."""

import asyncio
import json
from pathlib import Path

import pytest

from rollbus.bus.client import presence
from rollbus.frontend.cli.exits import ExitCode
from rollbus.schemas.presence import WorkerState
from tests.cli.support import run_rollbus
from tests.control.support import MODEL, ask, folders, serving_here, start_here
from tests.support.fleet import until_state, until_worker
from tests.support.invariants import check_stream
from tests.support.requests import start_stream
from tests.support.waits import until


def table(stdout: str) -> list[list[str]]:
    """Return the worker and the result of each row that a command printed."""
    return [line.split()[1::-1] for line in stdout.splitlines()[1:-1]]


@pytest.mark.proves("P21")
async def test_requests_wait_while_the_fleet_is_paused(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """While the fleet is paused, no worker pulls requests, and new requests wait in the queue until the resume.

    A stream in flight continues where it was, with all its tokens. A worker that starts during the pause is paused too.
    """
    one, _ = folders(tmp_path)
    async with serving_here(nats_url, fleet, one, 2, step_s=0.025) as rb, asyncio.TaskGroup() as tasks:
        expected = await rb.complete(ask(max_tokens=200))
        stream = await start_stream(tasks, rb, ask(max_tokens=200))

        paused = await run_rollbus(nats_url, fleet, "pause")
        async with start_here(nats_url, fleet, "w2", one):
            late = tasks.create_task(rb.complete(ask(7, 8, 9)))
            await until_worker(rb, "w2", WorkerState.PAUSED)
            state = await until_state(rb, lambda state: sum(depth.waiting for depth in state.queues) == 1)
            shown = await run_rollbus(nats_url, fleet, "status")
            is_done = (late.done(), stream.reading.done())
            resumed = await run_rollbus(nats_url, fleet, "resume")
            await late
            await stream.reading

    assert (paused.code, table(paused.stdout)) == (0, [["w0", "applied"], ["w1", "applied"]])
    assert (resumed.code, table(resumed.stdout)) == (0, [[f"w{i}", "applied"] for i in range(3)])
    assert is_done == (False, False)
    assert [(worker.state, worker.pause_mode) for worker in state.workers] == [(WorkerState.PAUSED, "keep")] * 3
    assert shown.stdout.count("paused (keep)") == 5  # three workers, the desired state, and its author
    check_stream(stream.chunks, stream.request)
    tokens = [token_id for chunk in stream.chunks for token_id in chunk.token_ids.tolist()]
    assert tokens == expected.token_ids.tolist()


async def test_generate_on_a_paused_fleet_prints_the_resume_command_and_waits(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """On a paused fleet, `generate` prints since when it is paused and the command that resumes it, and waits.

    The printed time is that of the pause, also if another command was recorded since.
    """
    one, _ = folders(tmp_path)
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [1, 2], "max_tokens": 2}) + "\n")
    async with serving_here(nats_url, fleet, one, 1) as rb, asyncio.TaskGroup() as tasks:
        await rb.fleet.pause()
        paused_at = await rb.fleet.paused_since(MODEL)
        await rb.fleet.flush_cache()
        args = ("generate", "--input", str(prompts), "--output", str(output), "--json")
        job = tasks.create_task(run_rollbus(nats_url, fleet, *args))
        await until_state(rb, lambda state: sum(depth.waiting for depth in state.queues) == 1)
        is_done = job.done()
        await rb.fleet.resume()
        ended = await job

    assert not is_done
    assert (ended.code, json.loads(ended.stdout)["done"]) == (ExitCode.OK, 1)
    assert ended.stderr == (
        f"the fleet is paused since {paused_at.astimezone():%Y-%m-%d %H:%M:%S}; the requests wait for: "
        f"python -m rollbus.frontend.cli resume --nats {nats_url} --fleet {fleet}\n"
    )


async def test_a_wait_on_a_paused_fleet_is_logged_once(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client logs one warning per pause, however many requests wait, with its time and the resume command.

    The client logs nothing for a muted pause.
    """
    monkeypatch.setattr(presence, "WARN_AFTER_S", 0.0)
    one, _ = folders(tmp_path)

    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if "client.pause_detected" in record.getMessage()]

    async def count() -> int:
        return len(warned())

    async with serving_here(nats_url, fleet, one, 1) as rb:
        times = []
        for number, is_muted in ((1, True), (1, False), (2, False)):
            await rb.fleet.pause()
            await until_worker(rb, "w0", WorkerState.PAUSED)
            times.append(await rb.fleet.paused_since(MODEL))
            if is_muted:
                await rb.fleet.mute_pause()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(2):
                    tasks.create_task(rb.complete(ask(1)))
                if not is_muted:
                    await until(count, number)
                # During several rounds, the client must log nothing more.
                await asyncio.sleep(3 * presence.ROUND_S)
                await rb.fleet.resume()

    assert warned() == [
        f"client.pause_detected model={MODEL} reason=the fleet is paused since "
        f"{paused_at.astimezone():%Y-%m-%d %H:%M:%S}; to resume it: rollbus resume"
        for paused_at in times[1:]
        if paused_at is not None
    ]
    assert len(warned()) == 2
