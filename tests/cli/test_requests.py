"""`rollbus requests`: the lists in a pipe and in a terminal, and the trace that Enter opens."""

import asyncio
import json

import pytest

import rollbus
from rollbus import RequestList, RequestTrace, WorkerTimeline
from rollbus.frontend.cli.exits import ExitCode
from rollbus.frontend.cli.watch.traces import Browser, request_rows
from rollbus.frontend.command_json import RequestQuery
from rollbus.schemas.telemetry import RequestProgress
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.cli.support import on_terminal, run_rollbus, run_together
from tests.cli.test_trace import LIFE, timeline
from tests.support.fleet import synthetic_worker
from tests.support.requests import endless, start_stream

SLOW = SyntheticConfig(step_s=0.005, max_model_len=10_000_000)


def running(name: str, idle_s: float, **fields: object) -> WorkerTimeline:
    """Return the timeline of a request that decodes."""
    progress = RequestProgress(seconds=4.25, idle_s=idle_s, tokens=1200)
    return timeline(*LIFE[:5], request_id=name, progress=progress, **fields)


def test_a_row_has_state_times_and_tokens() -> None:
    """A row has the state of a request, its id as its caller gave it, its sample, tokens, times and attempt."""
    held = timeline(
        *LIFE[:6], request_id="x:1", given_id="my / id", child=2, number=3, progress=RequestProgress(seconds=1)
    )
    rows = list(request_rows([running("r", 2.0), held, timeline(*LIFE)]))

    assert rows == [
        ["decode", "r", "4.2", "1,200", "2.0 s", "a", "alice", "-", "m"],
        ["held by weights", "my / id #2", "1.0", "0", "0.0 s", "a", "alice", "3", "m"],
        ["stop", "r", "4.8", "41", "-", "a", "alice", "-", "m"],
    ]


def test_a_request_stays_selected_if_the_order_changes() -> None:
    """Keys move the selection, which stays with its request in a new list. Enter opens that request's trace."""
    browser = Browser(RequestQuery())
    browser.found = RequestList(timelines=(running("r1", 3.0), running("r2", 2.0), running("r3", 1.0)))
    assert browser.press("down")
    browser.found = RequestList(timelines=(running("r3", 3.0), running("r1", 2.0), running("r2", 1.0)))
    assert browser.press("open")

    assert browser.opened == "r2"
    browser.trace = RequestTrace(request_id="r2", timelines=(timeline(*LIFE, request_id="r2"),))
    assert browser.draw(80, 30).plain.startswith("request r2 of client alice")
    assert browser.press("back")
    assert browser.draw(80, 30).plain.startswith("3 requests at 0 workers")
    assert browser.press("sort")
    assert browser.draw(80, 30).plain == "slowest: waiting for the workers"
    assert not browser.press("quit")


@pytest.mark.parametrize("size", [(80, 24), (40, 8), (160, 50)])
def test_the_selected_request_is_visible(size: tuple[int, int]) -> None:
    """The list fits the screen, and the selected request is on it."""
    width, height = size
    browser = Browser(RequestQuery())
    browser.found = RequestList(timelines=tuple(running(f"request-{n}", 99.0 - n) for n in range(60)))
    for _ in range(45):
        browser.press("down")
    text = browser.draw(width, height)

    lines = text.plain.split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any("request-45" in line for line in lines)


async def test_the_list_in_a_pipe_and_the_trace_in_a_terminal(nats_url: str, fleet: str) -> None:
    """In a pipe, the list is a table or JSON. In a terminal, Enter opens the trace, b goes back and q quits."""
    args = ("requests", "--nats", nats_url, "--fleet", fleet)
    async with (
        rollbus.connect(nats_url, fleet=fleet, client="alice") as rb,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        stream = await start_stream(tasks, rb, endless("my request"))
        lines = ("requests --client alice", "requests running --json", "requests failed")
        table, as_json, nothing = await run_together(nats_url, fleet, *lines)
        with on_terminal(*args, size=(100, 30)) as terminal:
            await asyncio.to_thread(terminal.read_until, "my request")
            terminal.press(b"\r")
            await asyncio.to_thread(terminal.read_until, "seconds in each phase")
            terminal.text = ""
            terminal.press(b"b")
            await asyncio.to_thread(terminal.read_until, "the longest time without a token first")
            terminal.press(b"s")
            await asyncio.to_thread(terminal.read_until, "the slowest first")
            terminal.press(b"q")
            assert await asyncio.to_thread(terminal.read_to_end) == ExitCode.OK
        await rb.fleet.abort(["my request"])
        await stream.reading
    alone = await run_rollbus(nats_url, fleet, "requests")

    told = json.loads(as_json.stdout)
    assert (table.code, table.stderr) == (ExitCode.OK, "")
    title, _, head, row = table.stdout.splitlines()
    assert title == "1 request at 1 worker: in flight, the longest time without a token first"
    assert head.startswith("state   request     seconds  tokens")
    assert row.startswith("decode")
    assert (told["show"], told["silent"], told["timelines"][0]["given_id"]) == ("running", [], "my request")
    assert (nothing.code, nothing.stdout) == (ExitCode.OK, "no requests at 1 worker: failed, the last first\n")
    assert alone.code == ExitCode.NO_WORKERS
