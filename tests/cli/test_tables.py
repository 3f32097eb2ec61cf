"""Every table of the command line fits 80, 100 and 160 columns, and cuts no word of names of 64 and 256 characters."""

import argparse
import os
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus import FleetState, QueueDepth, RequestList, RequestTrace
from rollbus.bus.protocol.telemetry.rates import FleetRates
from rollbus.frontend.cli.console import write
from rollbus.frontend.cli.control import show_result
from rollbus.frontend.cli.doctor.machine import fail, ok
from rollbus.frontend.cli.doctor.server import show_findings
from rollbus.frontend.cli.tables import lay_out, print_table, print_text, table_text, wrapped
from rollbus.frontend.cli.watch.experts import VERSION_COLUMNS
from rollbus.frontend.cli.watch.status import (
    DESIRED_COLUMNS,
    ENGINE_COLUMNS,
    PREFIX_COLUMNS,
    PUBLISHED_COLUMNS,
    QUEUE_COLUMNS,
    WORKER_COLUMNS,
    desired_rows,
    engine_rows,
    prefix_rows,
    print_state,
    published_rows,
    queue_rows,
    state_as_json,
    worker_rows,
)
from rollbus.frontend.cli.watch.top import Page, TopOptions, TopView, draw, print_top
from rollbus.frontend.cli.watch.traces import list_notes, list_table, trace_lines
from rollbus.frontend.cli.weights import COLUMNS as WEIGHTS_COLUMNS
from rollbus.frontend.cli.weights import ModelWeights, head_line, weights_rows
from rollbus.schemas.control import (
    AnyCommand,
    DesiredState,
    Drain,
    FinishWeightUpdate,
    LoadLora,
    Pause,
    Recorded,
    Resume,
    Sleep,
    UnloadLora,
    UpdateWeights,
)
from rollbus.schemas.manifest import ChainRecord, Link
from rollbus.schemas.presence import EngineStats, LoraInfo, RoutedExpertsInfo, WorkerCounters, WorkerState
from rollbus.schemas.telemetry import RequestProgress
from rollbus.schemas.weights import PublishedVersion, Staging, WeightSource
from tests.cli.support import ROOT
from tests.cli.test_ledger import MIXED
from tests.cli.test_trace import LIFE, timeline
from tests.support.fleet import capabilities, presence

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
    show_result(AS_TEXT, replace(MIXED, missing={worker: why}))


def show_experts(worker: str, model: str) -> None:
    """Print the table of `experts`, which has no names."""
    print_table(VERSION_COLUMNS, [["7", "generated", "1,000,000", "100%", "1.25", "12.50", "0.987", "12"]])


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
    text = draw(TopView(fleet_of(worker, model), FleetRates(), 0.0), TopOptions(), Page(), width, 60).plain

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
    text = "\x1b[2Jgone\r\nw9 serving\u202e\x9b1m [bold]"
    for shown in (table_text(("last error",), [[text]], width), "\n".join(wrapped(text, width))):
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


STARTING = presence(incarnation="i", state=WorkerState.STARTING, weight_version=3, free_slots=0, uptime_s=59.9)
MOE = capabilities(
    engine="vllm",
    engine_version="0.30",
    max_model_len=512,
    max_num_seqs=8,
    dtype="bfloat16",
    routed_experts=RoutedExpertsInfo(num_layers=4, top_k=2, num_experts=16, dtype="u1"),
    weight_updates=True,
    max_loras=2,
)
DENSE = replace(MOE, routed_experts=None, weight_updates=False, max_loras=0)
PAUSED = replace(
    STARTING,
    state=WorkerState.PAUSED,
    pause_mode="keep",
    in_flight=2,
    queued=1,
    free_slots=6,
    uptime_s=7260,
    capabilities=MOE,
    target_version=4,
    epoch=17,
    loras=(LoraInfo(name="math", version=2), LoraInfo(name="code", version=1)),
    lease_age_s=0.44,
    last_error="oops",
)


def recorded(epoch: int, command: AnyCommand) -> Recorded:
    """Return a register."""
    return Recorded(epoch=epoch, command=command)


DESIRED = DesiredState(
    model="m",
    epoch=9,
    registers={
        "weights": recorded(7, UpdateWeights(version=4, source=WeightSource(path="/w/4"))),
        "lora:math": recorded(3, LoadLora(name="math", source=WeightSource(objects="b/p"), version=2)),
        "lora:old": recorded(4, UnloadLora(name="old")),
        "pause": recorded(5, Pause(mode="wait")),
        "sleep": recorded(6, Sleep()),
    },
    workers={"w": {"pause": recorded(8, Drain())}, "x": {"pause": recorded(9, Resume())}},
)


def test_a_worker_has_a_cell_for_each_column() -> None:
    """A row has a cell for each column, for a worker that starts and for a worker with all values."""
    starting, paused = worker_rows([PAUSED, STARTING])

    assert dict(zip(WORKER_COLUMNS, starting, strict=True)) == {
        "state": "starting", "worker": "w", "model": "m", "role": "-", "version": "3", "in flight": "0/0",
        "queued": "0", "LoRAs": "-", "epoch": "0", "uptime": "59s", "lease age": "-", "note": "",
    }  # fmt: skip
    assert paused == [
        *("paused (keep)", "w", "m", "-", "3 of 4", "2/8", "1", "math (2), code (1)", "17", "2h01m", "-", "oops")
    ]


def test_the_worst_state_comes_first() -> None:
    """Workers are listed by state, the worst first, then with an error before without, then by name."""
    states = (WorkerState.SERVING, WorkerState.PAUSED, WorkerState.UNKNOWN, WorkerState.FAILED, WorkerState.OUTDATED)
    workers = [replace(STARTING, worker=f"{state}", state=state) for state in states]
    broken = replace(STARTING, worker="z", state=WorkerState.SERVING, last_error="oops")

    assert [row[1] for row in worker_rows([*workers, broken])] == [
        "failed", "outdated", "unknown", "paused", "z", "serving"
    ]  # fmt: skip
    assert {row[0] for row in worker_rows([replace(STARTING, state=state) for state in WorkerState])} == {*WorkerState}


def test_a_late_lease_is_shown() -> None:
    """The age of a lease is shown from 2 s, because a healthy worker renews it every second."""
    ages = {row[1]: row[10] for row in worker_rows([replace(STARTING, worker=f"{s}", lease_age_s=s) for s in (1, 7)])}
    assert ages == {"1": "-", "7": "7 s"}


def test_the_note_has_the_staging_and_the_error() -> None:
    """The note of a worker has the progress of staging with its source, and the complete last error."""
    staging = Staging(source="objects:b/8", stage="fetching", done_bytes=2**29, total_bytes=2**30)
    [row] = worker_rows([replace(PAUSED, staging=staging)])

    assert row[-1] == "fetching 50 % of 1.0 GiB from objects:b/8; oops"


def test_the_newest_published_version_of_a_model_has_a_row() -> None:
    """Each model has one row with its newest published version. A store without a limit shows a dash."""
    older = PublishedVersion(version=7, stored_bytes=2**30)
    newer = PublishedVersion(version=8, stored_bytes=2**25, model_bytes=2**31, chain_length=3, used_bytes=2**32)
    [row] = published_rows([replace(PAUSED, published=newer), STARTING, replace(PAUSED, published=older)])

    assert dict(zip(PUBLISHED_COLUMNS, row, strict=True)) == {
        "published of": PAUSED.model, "version": "8", "stored": "32 MiB", "model": "2.0 GiB",
        "after anchor": "3", "store used": "4.0 GiB", "store limit": "-",
    }  # fmt: skip


def test_prefixes_and_placement_have_a_row() -> None:
    """Each worker that served or refused a request has a row. Without a prefix cache, the hit rate is a dash."""
    counters = WorkerCounters(
        requests=10, prompt_tokens=12_500, cached_prompt_tokens=9000, recomputed_prompt_tokens=3000,
        placed=7, placements_refused=1, placed_prefix=2, placed_group=4,
    )  # fmt: skip
    busy = replace(PAUSED, counters=counters, engine_stats=EngineStats(prefix_cache_queries=800, prefix_cache_hits=600))
    full = replace(PAUSED, worker="full", counters=WorkerCounters(placements_refused=2))
    idle = replace(PAUSED, counters=WorkerCounters())

    rows = prefix_rows([STARTING, busy, full, idle])

    assert [dict(zip(PREFIX_COLUMNS, row, strict=True)) for row in rows] == [
        {
            "worker": PAUSED.worker, "cache hits": "75.0 %", "prompt tokens": "12,500", "recomputed": "3,000",
            "queued": "3", "placed": "7", "prefix": "2", "group": "4", "session": "0", "able": "0", "refused": "1",
        },
        {
            "worker": "full", "cache hits": "-", "prompt tokens": "0", "recomputed": "0",
            "queued": "0", "placed": "0", "prefix": "0", "group": "0", "session": "0", "able": "0", "refused": "2",
        },
    ]  # fmt: skip


def test_engines_with_equal_capabilities_share_a_row() -> None:
    """Engines with equal capabilities share a row, which names only a few of many workers."""
    workers = [replace(PAUSED, worker=f"w{i}") for i in range(5)]
    other = replace(PAUSED, worker="d", capabilities=DENSE)

    rows = engine_rows([STARTING, *workers, other])

    assert [dict(zip(ENGINE_COLUMNS, row, strict=True)) for row in rows] == [
        {
            "engine": "vllm 0.30", "dtype": "bfloat16", "max_model_len": "512", "max_num_seqs": "8",
            "routed experts": "2 of 16 in 4 layers, u1", "can": "weights, 2 LoRAs",
            "workers": "w0, w1, w2 and 2 more",
        },
        {
            "engine": "vllm 0.30", "dtype": "bfloat16", "max_model_len": "512", "max_num_seqs": "8",
            "routed experts": "-", "can": "-", "workers": "d",
        },
    ]  # fmt: skip


def test_prefill_and_decode_workers_share_a_row_of_their_engine() -> None:
    """Prefill and decode workers share the row of their engine. The role is a column of the worker."""
    shared = replace(MOE, kv_connector="NixlConnector vllm-0.30.0 bfloat16")
    workers = [replace(PAUSED, worker=role, capabilities=replace(shared, role=role)) for role in ("prefill", "decode")]

    assert {row[3] for row in worker_rows(workers)} == {"prefill", "decode"}
    assert [row[-2:] for row in engine_rows(workers)] == [["weights, 2 LoRAs, KV by NixlConnector", "prefill, decode"]]


def test_a_queue_has_a_row_for_each_model() -> None:
    """Each model has one row with the waiting requests per lane and the sum of delivered requests.

    An unknown depth is a dash.
    """
    depths = [
        QueueDepth(model="a", lane="resume", waiting=1, in_hand=2),
        QueueDepth(model="a", lane="high", waiting=3, in_hand=0),
        QueueDepth(model="a", lane="normal", waiting=40, in_hand=5),
        QueueDepth(model="a", lane="low", waiting=0, in_hand=0),
        QueueDepth(model="b", lane="normal", waiting=6, in_hand=0),
    ]

    rows = queue_rows(depths)

    assert rows == [["a", "1", "3", "40", "0", "7", "-"], ["b", "-", "-", "6", "-", "0", "-"]]
    assert {len(row) for row in rows} == {len(QUEUE_COLUMNS)}
    assert queue_rows([]) == queue_rows([QueueDepth(model="a", lane="low", waiting=0, in_hand=0)]) == []


def test_a_queue_of_a_cluster_names_the_servers_that_are_behind() -> None:
    """The row shows the smallest number of replicas of the lanes, and each server that is behind once."""
    lanes = [
        QueueDepth(model="a", lane="high", waiting=0, in_hand=0, leader="n1", replicas=3, behind=("n0 (lags by 2)",)),
        QueueDepth(model="a", lane="low", waiting=0, in_hand=0, leader="n2", replicas=3, behind=("n0 (lags by 2)",)),
    ]

    assert queue_rows(lanes)[0][-1] == "3, behind: n0"


def test_the_desired_state_has_a_row_for_each_model_and_exception() -> None:
    """The desired state has a row per model and per worker with other registers.

    It shows only recorded commands that still apply.
    """
    rows = desired_rows({"m": DESIRED, "a": DesiredState(model="a")})

    assert rows == [
        ["a", "0", "-", "-", "-", "-"],
        ["m", "9", "4, unpinned", "/w/4", "paused (wait), asleep", "math (2, unpinned)"],
        ["m, only w", "-", "-", "-", "drained", "-"],
        ["m, only x", "-", "-", "-", "resumed", "-"],
    ]
    assert {len(row) for row in rows} == {len(DESIRED_COLUMNS)}
    transferred = DesiredState(model="m", registers={"weights": recorded(1, FinishWeightUpdate(version=8))})
    assert desired_rows({"m": transferred})[0][2:4] == ["8", "the transfer engine"]


STATE = FleetState(
    fleet="f",
    workers=(PAUSED,),
    queues=(QueueDepth(model="m", lane="high", waiting=3, in_hand=0),),
    desired={"m": DESIRED},
)


def test_the_names_of_the_state_are_documented() -> None:
    """The page of `rollbus status`, with the messages of wire.md that it links to, has all names of its JSON.

    It also has the states of a worker.
    """
    page = re.sub(r"```.*?```", "", (ROOT / "docs/operate/commands.md").read_text(), flags=re.DOTALL)
    text = page.partition("## rollbus status")[2].partition("\n## ")[0]
    wire = (ROOT / "docs/wire.md").read_text()
    for message in ("WorkerPresence", "Capabilities", "DesiredState"):
        text += wire.partition(f"<!-- table: {message} -->")[2].partition("<!-- end -->")[0]
    written = state_as_json(STATE)
    [worker], [queue] = written["workers"], written["queues"]
    known = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`[^`]+`", text))))

    assert {*written, *worker, *worker["capabilities"], *queue, *written["desired"]["m"]} - known == set()
    assert {state.value for state in WorkerState} - {"failed", "stopped", "unknown"} - known == set()


def test_the_names_of_the_state_are_stable() -> None:
    """The names in `rollbus status --json` are stable for programs: names may be added, but not changed.

    Those of presence, capabilities and commands are names of the wire, which has golden bytes.
    """
    written = msgspec.json.decode(msgspec.json.encode(state_as_json(STATE)))

    assert sorted(written) == ["desired", "fleet", "queue_problems", "queues", "workers"]
    [worker], [queue], desired = written["workers"], written["queues"], written["desired"]["m"]
    assert worker["loras"] == [{"name": "math", "version": 2}, {"name": "code", "version": 1}]
    assert set(queue) == {"model", "lane", "waiting", "in_hand", "leader", "replicas", "behind"}
    assert sorted(desired) == ["epoch", "registers", "workers"]
    weights = desired["registers"]["weights"]
    assert (weights["epoch"], weights["command"]["command"]) == (7, "update_weights")
    assert (weights["command"]["version"], weights["command"]["source"]["path"]) == (4, "/w/4")
    assert desired["workers"]["w"]["pause"]["command"]["command"] == "drain"
