"""Every table of the command line fits 80, 100 and 160 columns, and cuts no word of names of 64 and 256 characters."""

import argparse
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus import FleetState, QueueDepth, RequestList, RequestTrace
from rollbus.bus.protocol.telemetry.rates import FleetRates
from rollbus.frontend.cli.console import write
from rollbus.frontend.cli.control import show_ledger
from rollbus.frontend.cli.doctor.host import fail, ok
from rollbus.frontend.cli.doctor.server import show_findings
from rollbus.frontend.cli.tables import lay_out, print_table, print_text, table_text
from rollbus.frontend.cli.tour import COLUMNS as EXPERT_COLUMNS
from rollbus.frontend.cli.tour import expert_rows
from rollbus.frontend.cli.watch.experts import VERSION_COLUMNS
from rollbus.frontend.cli.watch.status import print_state
from rollbus.frontend.cli.watch.top import TopOptions, TopView, draw, print_top
from rollbus.frontend.cli.watch.traces import list_notes, list_table, trace_lines
from rollbus.frontend.cli.weights import COLUMNS as WEIGHTS_COLUMNS
from rollbus.frontend.cli.weights import ModelWeights, head_line, weights_rows
from rollbus.schemas.manifest import ChainRecord, Link
from rollbus.schemas.presence import EngineStats, LoraInfo, WorkerCounters, WorkerState
from rollbus.schemas.telemetry import RequestProgress
from rollbus.schemas.weights import Staging
from tests.cli.test_fleet_tables import DESIRED, PAUSED, STARTING
from tests.cli.test_ledger import MIXED
from tests.cli.test_trace import LIFE, timeline

AS_TEXT = argparse.Namespace(json=False)


def fleet_of(worker: str, model: str) -> FleetState:
    """Return a fleet in which every table of `status` has a row."""
    counters = WorkerCounters(
        requests=10**7, prompt_tokens=10**9, recomputed_prompt_tokens=10**8, placed=10**6, placements_refused=9,
        placed_prefix=2, placed_group=4, placed_session=3, placed_able=8,
    )  # fmt: skip
    broken = replace(
        PAUSED, worker=worker, model=model, counters=counters, engine_stats=EngineStats(prefix_cache_queries=9),
        last_error=f"cannot load {model} of {worker}: the file is truncated, so load it again from its first source",
        loras=(LoraInfo(name=model, version=2),), staging=Staging(source=f"/w/{model}", stage="fetching"),
    )  # fmt: skip
    return FleetState(
        fleet="f",
        workers=(replace(STARTING, worker="local-1", state=WorkerState.SERVING), broken),
        queues=(QueueDepth(model=model, lane="high", waiting=3, in_hand=2, leader=worker, behind=(worker,)),),
        queue_problems={model: f"the queue of {model} has no leader"},
        desired={model: replace(DESIRED, model=model)},
    )


def show_status(worker: str, model: str) -> None:
    """Print the tables of `status`."""
    print_state(fleet_of(worker, model))


def show_top(worker: str, model: str) -> None:
    """Print the tables of `top`."""
    print_top(TopView(fleet_of(worker, model), FleetRates(), 0.0), TopOptions())


def show_trace(worker: str, model: str) -> None:
    """Print the tables of `trace`."""
    one = timeline(*LIFE, worker=worker, model=model, prompt_tokens=9)
    write("\n".join(trace_lines(RequestTrace(request_id="r", timelines=(one,)), int(os.environ["COLUMNS"]))))


def show_requests(worker: str, model: str) -> None:
    """Print the table of `requests`."""
    running = timeline(*LIFE[:6], worker=worker, model=model, progress=RequestProgress(seconds=9.5, idle_s=2, tokens=7))
    found, width = RequestList(timelines=(running,), workers_answered=1), int(os.environ["COLUMNS"])
    write("\n".join([*list_notes("running", found, width), *list_table(found, width).lines]))


def show_doctor(worker: str, model: str) -> None:
    """Print the table of `doctor`."""
    show_findings(
        AS_TEXT, [ok("python", "3.11"), fail("fleet", f"{worker} is late", f"stop {worker} of {model}")], is_well=False
    )


def show_weights(worker: str, model: str) -> None:
    """Print the table of `weights`."""
    link = Link(version=7, objects=f"b/{model}", digest="", anchor_bytes=2**30)
    weights = ModelWeights(ChainRecord(links=(link,), model=model), 1.0, 0, 0, frozenset(), {7: [worker, "w"]})
    print_text(head_line(weights))
    print_table(WEIGHTS_COLUMNS, weights_rows(weights))


def show_command(worker: str, model: str) -> None:
    """Print the command result of `pause` and of every other command."""
    why = f"{worker} has no {model}"
    show_ledger(AS_TEXT, replace(MIXED, missing={worker: why}))


def show_experts(worker: str, model: str) -> None:
    """Print the tables of `experts` and `demo`, which have no names."""
    print_table(VERSION_COLUMNS, [["7", "generated", "1,000,000", "100%", "1.25", "12.50", "0.987", "12"]])
    print_table(EXPERT_COLUMNS, expert_rows(np.arange(512).reshape(2, 256)))


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("length", [8, 64, 256])
@pytest.mark.parametrize(
    "show", [show_status, show_top, show_trace, show_requests, show_doctor, show_weights, show_command, show_experts]
)
def test_each_command_fits_and_cuts_no_name(
    show: Callable[[str, str], None],
    width: int,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line that is longer than the terminal is a single name. Each name appears whole."""
    monkeypatch.setenv("COLUMNS", str(width))
    worker, model = "w" * min(length, 64), "m" * length

    show(worker, model)

    shown = capsys.readouterr().out
    assert {line for line in shown.splitlines() if len(line) > width and len(line.split()) > 1} == set()
    assert "…" not in shown
    if show is not show_experts:
        assert worker in shown.replace("\n", " ").split() or worker in shown


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("length", [8, 64, 256])
def test_the_screen_of_top_folds_names_as_a_terminal_does(width: int, length: int) -> None:
    """On the screen of `top`, a name that is longer than the screen continues on the next line."""
    worker, model = "w" * min(length, 64), "m" * length
    text = draw(TopView(fleet_of(worker, model), FleetRates(), 0.0), TopOptions(), width, 60).text.plain

    assert max(map(len, text.split("\n"))) <= width
    assert worker in text.replace("\n", "").replace(" ", "")
    assert "…" not in text


def test_a_table_that_fits_has_aligned_columns() -> None:
    """Texts stand on the left and numbers on the right, without trailing blanks."""
    assert table_text(("name", "count", "note"), [["a", "5", "x y"], ["bcdefg", "1,000", ""]], 80).split("\n") == [
        "name    count  note",
        "a           5  x y",
        "bcdefg  1,000",
    ]
    assert table_text(("a", "b"), [], 80) == "a  b"


@pytest.mark.parametrize("nothing", ["", "-", "0", "0.00", "0 %", "0.0 GiB", "0s"])
def test_columns_without_a_value_are_left_out(nothing: str) -> None:
    """Columns whose cells are all zero or empty are left out, except the first."""
    assert table_text(("a", "b", "c"), [["0", nothing, "1"], ["0", "-", "0"]], 80).split("\n") == [
        "a  c",
        "0  1",
        "0  0",
    ]


def test_the_last_column_is_wrapped_between_words() -> None:
    """The last column is wrapped if 30 columns are left, and otherwise stands below."""
    text = "the weights of this version are truncated"
    wide = table_text(("state", "why"), [["failed", text]], 40)
    narrow = table_text(("state", "why"), [["failed", text]], 34)

    assert wide.split("\n") == ["state   why", "failed  the weights of this version are", "        truncated"]
    assert narrow.split("\n") == ["state", "failed", "  why: the weights of this", "    version are truncated"]


def test_columns_that_do_not_fit_stand_below_their_row() -> None:
    """Columns from the right that do not fit stand below each row with their titles, without those that are empty."""
    rows = [["w", "1", "22", "333"], ["x", "1", "-", "333"]]
    text = table_text(("worker", "version", "in flight", "free slots"), rows, 20)

    assert text.split("\n") == [
        "worker  version",
        "w             1",
        "  in flight: 22;",
        "    free slots: 333",
        "x             1",
        "  free slots: 333",
    ]


@pytest.mark.parametrize("width", [20, 80])
def test_a_peer_cannot_move_the_cursor(width: int) -> None:
    """Control characters in a worker's texts are shown as escapes and not executed. A line break ends no row."""
    shown = table_text(("last error",), [["\x1b[2Jgone\r\nw9 serving\u202e\x9b1m [bold]"]], width)

    assert r"\x1b[2Jgone\r\nw9" in shown
    assert r"serving\u202e\x9b1m [bold]" in " ".join(shown.split())


@given(st.lists(st.lists(st.text("ab模 -0", max_size=50), min_size=3, max_size=3), max_size=4), st.integers(40, 120))
def test_every_word_of_a_table_is_shown_whole(rows: list[list[str]], width: int) -> None:
    """Each word of each cell that has a value is in the table, and only lines of one word exceed the width."""
    from rich.cells import cell_len

    shown: Any = lay_out(("first", "the second", "third"), rows, width)
    words = [word.rstrip(";") for line in shown.lines for word in line.split()]

    for row in rows:
        assert {word for cell in row for word in cell.split() if set(word) - set("-0")} <= {*words}
    assert all(cell_len(line) <= width or len(line.split()) == 1 for line in shown.lines)
