"""`rollbus trace`: the timeline of a request, on a terminal and as JSON."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import rollbus
from rollbus import RequestTrace, WorkerTimeline
from rollbus.bus.protocol.fleet.command_result import CommandResult
from rollbus.bus.protocol.telemetry.requests import merge_timelines
from rollbus.frontend.cli.app import main
from rollbus.frontend.cli.exits import ExitCode
from rollbus.frontend.cli.watch.experts import LEGEND, map_lines
from rollbus.frontend.cli.watch.traces import MAX_SHOWN, attempt_rows, event_rows, notes, phase_rows, trace_lines
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.options import pip_install
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.telemetry import LostAttempt, RequestTimeline, TimelineEvent
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.cli.support import run_rollbus, run_together
from tests.support.fleet import StartServed, asked_until, planes_of, synthetic_worker
from tests.support.hand_control import controlled
from tests.support.hand_worker import chunk, worker_by_hand
from tests.support.requests import endless, short, sized, start_stream

SLOW = SyntheticConfig(step_s=0.005, max_model_len=10_000_000)


def timeline(*events: TimelineEvent, **fields: object) -> WorkerTimeline:
    """Return a timeline of request `r`, by default on worker `a`."""
    given: dict[str, object] = {"worker": "a", "client": "alice", "incarnation": "1", "model": "m", "request_id": "r"}
    given |= fields
    return WorkerTimeline(events=events, **given)  # type: ignore[arg-type]


LIFE = (
    TimelineEvent(at=100.0, event="published"),
    TimelineEvent(at=100.25, event="offered", weight_version=7),
    TimelineEvent(at=100.25, event="started"),
    TimelineEvent(at=100.75, event="prefilled", tokens=1200, cached_tokens=1000),
    TimelineEvent(at=100.75, event="first_token"),
    TimelineEvent(at=101.75, event="held", tokens=20, reason="weights"),
    TimelineEvent(at=103.75, event="resumed"),
    TimelineEvent(at=103.75, event="weights", weight_version=8, tokens=20),
    TimelineEvent(at=104.75, event="ended", tokens=41, reason="stop"),
)


def test_each_attempt_has_a_line_and_each_event() -> None:
    """Each attempt and each event has a row.

    Durations add up, and times are relative to the first event of all attempts.
    """
    again = timeline(TimelineEvent(at=106.0, event="offered", weight_version=8), worker="b", attempt=1, number=2)
    trace = RequestTrace(
        request_id="r", timelines=(timeline(*LIFE, lane="normal", prompt_tokens=1200), again), workers_asked=2
    )

    assert list(attempt_rows(trace)) == [
        ["1", "a", "", "normal", "1,200", "41", "7, 8", "stop"],
        ["2", "b", "", "placed", "0", "", "8", "in flight"],
    ]
    assert list(phase_rows(trace)) == [
        ["1", "a", "0.250", "0.000", "0.500", "2.000", "2.000", "20.0"],
        ["2", "b", "", "", "", "", "", ""],
    ]
    rows = list(event_rows(trace))
    assert [row[:5] for row in rows[:3]] == [
        ["1", "a", "0.000", "", "published"],
        ["1", "a", "0.250", "0.250", "offered"],
        ["1", "a", "0.250", "0.000", "started"],
    ]
    assert [row[5] for row in rows] == [
        "", "version 7", "", "1,200 tokens, 1,000 cached", "", "20 tokens, weights", "",
        "version 8, 20 tokens", "41 tokens, stop", "version 8",
    ]  # fmt: skip
    assert rows[-1][:4] == ["2", "b", "6.000", ""]


def test_a_lost_attempt_and_both_phases_have_a_line_with_one_number() -> None:
    """An attempt whose worker is gone has a line from the next attempt's worker. Both phases have the same number."""
    lost = (LostAttempt(attempt=1, worker="gone", at=101.5, tokens=7, reason="worker_lost"),)
    offered = TimelineEvent(at=102.0, event="offered", weight_version=7)
    again = RequestTimeline(request_id="r", client="alice", lost=lost, events=(offered,))
    result = CommandResult(
        command="read_request",
        id="i",
        seconds=0.0,
        applied={
            "p": ack("p", replace(again, attempt=2, phase="prefill")),
            "d": ack("d", replace(again, attempt=3, phase="decode")),
        },
    )
    trace = merge_timelines("r", result)

    assert [row[:3] + row[5:6] + row[-1:] for row in attempt_rows(trace)] == [
        ["1", "gone", "", "7", "lost: worker_lost"],
        ["2", "p", "prefill", "", "in flight"],
        ["2", "d", "decode", "", "in flight"],
    ]
    assert [row[0] for row in phase_rows(trace)] == ["2", "2"]
    assert next(iter(event_rows(trace))) == ["1", "gone", "0.000", "", "lost", "7 tokens, worker_lost"]


def ack(worker: str, timeline: RequestTimeline) -> Ack:
    """Return the answer of a worker with one timeline."""
    return Ack(
        id="i", command="read_request", worker=worker, incarnation="1", model="m", status=AckStatus.APPLIED,
        timelines=(timeline,),
    )  # fmt: skip


async def test_the_attempt_of_a_killed_worker_is_shown(nats_url: str, fleet: str) -> None:
    """After the loss of a worker, the next worker reports the lost attempt with its worker, time and kept tokens."""
    async with rollbus.connect(nats_url, fleet=fleet, placement=False, client="me") as rb, asyncio.TaskGroup() as tasks:
        async with worker_by_hand(nats_url, fleet, "killed") as first:
            await first.announce()
            await rb.fleet.wait_for_workers()
            completing = tasks.create_task(rb.complete(short("r", model="m")))
            key = await first.next_key()
            await first.frame(0, replace(chunk(key, 0, 7), logprobs_data=bytes(4)), admitted=(key,))
            await first.acked(1)
            await first.announce(WorkerState.FAILED)
        async with synthetic_worker(nats_url, fleet, model="m", worker_id="second"):
            generation = await completing
            trace = await rb.fleet.timelines("r")

    assert generation.attempts == 2
    lost, second = trace.timelines
    assert (lost.number, lost.worker, lost.events[0].event, lost.events[0].tokens) == (1, "killed", "lost", 1)
    assert (second.number, second.worker, second.phase) == (2, "second", None)
    assert 0 <= second.events[0].at - lost.events[0].at < 3600


def test_the_pause_of_a_paused_request_ends_with_now() -> None:
    """A paused request shows `now` as the end of its pause."""
    trace = RequestTrace(request_id="r", timelines=(timeline(*LIFE[:6]),))

    [attempt], [phases] = attempt_rows(trace), phase_rows(trace)
    assert (attempt[-3:], phases[-3:]) == (["", "7", "in flight"], ["", "now", ""])


def test_rows_name_sample_and_client_if_there_are_several() -> None:
    """Rows name sample and client if there are several. The events of many samples are only in --json."""
    many = tuple(timeline(LIFE[1], child=child) for child in range(MAX_SHOWN + 2))
    samples = RequestTrace(request_id="r", timelines=many, left_out=3)
    clients = RequestTrace(request_id="r", timelines=(timeline(LIFE[1]), timeline(LIFE[1], client="bob")))

    assert [row[0] for row in attempt_rows(samples)][:2] == ["1 of sample 0", "1 of sample 1"]
    assert len(list(event_rows(samples))) == MAX_SHOWN
    assert list(notes(samples)) == [
        "The events of 2 more timelines: --json.",
        "3 earlier timelines did not fit into the answers.",
    ]
    assert [row[0] for row in phase_rows(clients)] == ["1 of alice", "1 of bob"]


def test_the_notes_name_wrong_clocks_and_silent_workers() -> None:
    """The notes name workers with a clock that is behind, and workers without an answer."""
    early = timeline(TimelineEvent(at=100.0, event="published"), TimelineEvent(at=98.5, event="offered"))
    trace = RequestTrace(request_id="r", timelines=(early,), silent={"w3": "it did not answer within 5.0 s"})

    assert list(notes(trace)) == [
        "The clock of a is at least 1.500 s behind the server's: compare times across machines with that in mind.",
        "No answer from w3: it did not answer within 5.0 s.",
    ]


def test_control_characters_from_the_wire_are_replaced() -> None:
    """Control characters from the wire are escaped."""
    hostile = TimelineEvent(at=1.0, event="\x1b[2J", reason="\x07x")
    trace = RequestTrace(
        request_id="r\x1b[2J",
        timelines=(timeline(hostile, lane="\x1b]0;x\x07"), timeline(hostile, client="\x1b[31m")),
        silent={"w": "\x1b[2J"},
    )

    assert all(line.isprintable() for line in trace_lines(trace, 80))


async def test_a_request_is_shown(one_worker: StartServed, nats_url: str, fleet: str) -> None:
    """`trace` prints tables, also for the id of an OpenAI response, and JSON with complete timelines."""
    async with one_worker(worker_id="w0", options={"client": "alice", "placement": False}) as (rb, *_):
        await rb.complete(short("r"))
        shown, as_json = await run_together(nats_url, fleet, "trace cmpl-r", "trace r --json")

    assert (shown.code, shown.stderr, as_json.code, as_json.stderr) == (0, "", 0, "")
    head, attempts, _, phases, _, events = shown.stdout.split("\n\n")
    assert head == "request r of client alice to model synthetic"
    assert [line.split() for line in attempts.splitlines()] == [
        ["attempt", "worker", "lane", "prompt", "tokens", "end"],
        ["1", "w0", "normal", "3", "3", "length"],
    ]
    assert len(phases.splitlines()) == 2
    words = [[cell for cell in line.split() if cell[0].isalpha()] for line in events.splitlines()[1:]]
    assert [line[1] for line in words] == [
        "published", "offered", "started", "prefilled", "first_token", "ended",
    ]  # fmt: skip
    told = json.loads(as_json.stdout)
    [one] = told.pop("timelines")
    assert told == {
        "request_id": "r", "workers_asked": 1, "workers_answered": 1, "silent": [], "left_out": 0, "clock_skews": {},
    }  # fmt: skip
    assert (one["worker"], one["client"], one["attempt"], one["events"][-1]["tokens"]) == ("w0", "alice", 0, 3)


async def test_a_request_in_flight_is_shown(one_worker: StartServed, nats_url: str, fleet: str) -> None:
    """`trace` also shows a request in flight, even while it is paused."""
    async with one_worker(config=SLOW) as (rb, *_), asyncio.TaskGroup() as tasks:
        stream = await start_stream(tasks, rb, endless("r"))
        await rb.fleet.pause()
        shown = await run_rollbus(nats_url, fleet, "trace", "r")
        await rb.fleet.resume()
        await rb.fleet.abort(["r"])
        await stream.reading

    assert (shown.code, shown.stderr) == (0, "")
    assert " in flight\n" in shown.stdout
    assert " tokens, pause\n" in shown.stdout


async def test_an_unknown_request_gives_exit_code_1(one_worker: StartServed, nats_url: str, fleet: str) -> None:
    """An unknown request gives exit code 1 and states what workers remember. A wrong id is a usage error.

    Without workers, the exit code is 5.
    """
    async with one_worker():
        unknown, wrong = await run_together(nats_url, fleet, "trace nothing", "trace 'a '")
    alone = await run_rollbus(nats_url, fleet, "trace", "nothing")

    assert (unknown.code, unknown.stdout) == (ExitCode.FAILED, "")
    assert unknown.stderr.strip() == (
        "rollbus: request 'nothing' is unknown to 1 of 1 workers; each worker remembers its open requests and the last "
        "1,000 that ended, until the worker exits"
    )
    assert (wrong.code, wrong.stdout) == (ExitCode.USAGE, "")
    assert "REQUEST is 'a '" in wrong.stderr
    assert (alone.code, alone.stdout) == (ExitCode.NO_WORKERS, "")


async def test_a_silent_worker_makes_the_answer_partial(nats_url: str, fleet: str) -> None:
    """If a worker does not answer, the exit code is partial and the note names it. If none answers, it is a timeout."""
    async with (
        rollbus.connect(nats_url, fleet=fleet, placement=False) as rb,
        synthetic_worker(nats_url, fleet, worker_id="a") as (worker, _),
    ):
        await rb.fleet.wait_for_workers()
        await rb.complete(short("r"))
        async with synthetic_worker(nats_url, fleet, worker_id="b") as (deaf, _):
            await rb.fleet.wait_for_workers(2)
            deaf._control._receive = lambda *_: None  # type: ignore[method-assign]
            partial = await run_rollbus(nats_url, fleet, "trace", "r", "--timeout-s", "2")
            worker._control._receive = lambda *_: None  # type: ignore[method-assign]
            late = await run_rollbus(nats_url, fleet, "trace", "r", "--timeout-s", "0.2")

    assert (partial.code, partial.stderr) == (ExitCode.PARTIAL, "")
    assert partial.stdout.splitlines()[-1].startswith("No answer from b: it did not answer within")
    assert (late.code, late.stdout) == (ExitCode.TIMEOUT, "")
    assert late.stderr.strip().endswith("No answer from a, b")


# `rollbus experts`: the map, its figures, and its notes.


def cells_of(line: str) -> str:
    """Return the characters of one layer."""
    return line.split("|")[1]


def test_each_character_stands_for_twice_the_load() -> None:
    """Each character stands for twice the load of the one before, and an even layer shows equal characters."""
    table = np.array([[8] * 8, [0, 1, 2, 4, 8, 16, 32, 1], [0] * 8, [64] + [0] * 7])
    title, even, uneven, empty, dense = map_lines(table, 2, 80)[-5:]

    assert cells_of(even) == "========"
    assert cells_of(uneven) == " .:-=+*."
    assert "max/mean  entropy  unused" in title
    assert uneven.split("|")[2].split() == ["4.00", "0.656", "1"]
    assert empty.endswith("|  no tokens")
    assert dense.endswith("|  does not route")


@pytest.mark.parametrize(("num_layers", "num_experts"), [(48, 128), (61, 384), (4, 40), (1024, 256)])
def test_large_models_fit_a_terminal(num_layers: int, num_experts: int) -> None:
    """The map of a large model fits 80 columns, and each character shows the busiest of a stated number of experts."""
    table = np.ones((num_layers, num_experts), np.int64)
    table[-1, -1] = num_experts * 20
    lines = map_lines(table, 8, 80)
    per_cell = -(-num_experts // len(cells_of(lines[-1])))

    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if "|" in line]) == num_layers + 1
    assert cells_of(lines[-1]).endswith("@")
    assert set(cells_of(lines[-2])) == {"="}
    assert per_cell == 1 or f"the busiest of each {per_cell}" in lines[0]
    assert len(map_lines(table, 8, 20)) >= num_layers


async def test_the_command_shows_the_counts_of_the_workers(
    one_worker: StartServed, nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """`experts` prints a map, JSON with all counts, a table by version, and a picture."""
    async with one_worker(worker_id="w0", config=SyntheticConfig(prefix_cache=True)) as (rb, *_):
        results = [await rb.complete(sized(64, 20)), await rb.complete(sized(80, 7))]
        await asked_until(rb, lambda window: window.generated.computed == 25)
        options = ("--worker w0", "--versions --plane prompt", f"--json --png {tmp_path / 'map.png'}")
        shown, versions, asked = await run_together(nats_url, fleet, *(f"experts {each}" for each in options))

    wanted = planes_of(results, 16)
    found = json.loads(asked.stdout)
    assert (shown.code, shown.stderr) == (ExitCode.OK, "")
    assert "generated: 25 tokens computed, 100% of them seen" in shown.stdout
    assert "1 of 1 workers; 4 layers x 16 experts, top 4" in shown.stdout
    assert LEGEND in shown.stdout
    row = next(line.split() for line in versions.stdout.splitlines() if line.split()[:2] == ["0", "prompt"])
    assert row[:4] == ["0", "prompt", "96", "100%"]
    assert found["planes"]["prompt"]["counts"] == wanted["prompt"].tolist()
    assert found["planes"]["generated"]["counts"] == wanted["generated"].tolist()
    assert found["versions"][0]["generated"]["seen"] == 25
    assert (found["workers_asked"], found["left_out"]) == (["w0"], {})
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


async def test_workers_of_an_earlier_release_change_the_exit_code(nats_url: str, fleet: str) -> None:
    """With a worker of an earlier release the exit code is 3 beside another worker and 1 if it is alone.

    Without workers, the exit code is 5.
    """
    async with controlled(nats_url, fleet, "old") as control:
        await control.rb.fleet.wait_for_workers()
        alone = await run_rollbus(nats_url, fleet, "experts")
        async with synthetic_worker(nats_url, fleet, model="m", worker_id="new"):
            await control.rb.fleet.wait_for_workers(2)
            beside = await run_rollbus(nats_url, fleet, "experts")
    nobody = await run_rollbus(nats_url, fleet, "experts")

    assert (alone.code, alone.stdout) == (ExitCode.FAILED, "")
    assert "no worker of m has counted experts: old: the worker runs an earlier release" in alone.stderr
    assert beside.code == ExitCode.PARTIAL
    assert "no routed experts were seen in that time" in beside.stdout
    reason = "the worker runs an earlier release, which does not answer this command"
    assert beside.stderr == f"rollbus: not counted: old: {reason}\n"
    assert nobody.code == ExitCode.NO_WORKERS


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without matplotlib, the error of --png names the extra before any worker is asked."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert main(["experts", "--png", "map.png"]) == ExitCode.FAILED
    assert f"--png requires matplotlib, which is not installed: {pip_install('rl')}" in capsys.readouterr().err
