"""`bench.scale`: its figures match its processes, and docs/scaling.md explains them."""

import json
from pathlib import Path

import pytest

from bench.report import shown_argument
from bench.scale import Side, Used, of_fleet, started_fleet, work
from bench.scale import Work as Done
from bench.scale_paper import DOC, MODELS, RESULTS, frame_bytes, with_tables
from rollbus.workers.engines.synthetic.config import SyntheticConfig


def test_the_scaling_page_equals_the_recorded_figures() -> None:
    """The tables of docs/scaling.md equal those that the figures beside it and the wire format give."""
    text = DOC.read_text()

    assert with_tables(text, json.loads(RESULTS.read_text())) == text


def test_a_recorded_command_has_no_absolute_path() -> None:
    """A recorded command names paths in the checkout relative to it and other paths below `DIR`.

    No result file has an absolute path.
    """
    arguments = (f"--json={RESULTS}", str(RESULTS), "/home/someone/a.json", "DIR", "3e-6", "--rounds")

    assert [shown_argument(argument) for argument in arguments] == [
        "--json=bench/results/scale.json",
        "bench/results/scale.json",
        "DIR/a.json",
        *arguments[3:],
    ]
    for file in sorted(RESULTS.parent.glob("*.json")):
        command = json.loads(file.read_text())["command"]
        assert not any(Path(argument.rpartition("=")[2]).is_absolute() for argument in command.split()), file


def test_each_token_of_a_frame_adds_the_bytes_of_one_row() -> None:
    """Routed experts add the bytes of one row and less than 16 further bytes to each token of a frame."""
    for model in MODELS:
        routing = frame_bytes(model) - frame_bytes(model, routed=False)
        assert model.row_bytes <= routing / model.in_flight < model.row_bytes + 16


def test_the_figures_of_a_request_exclude_the_usage_of_an_idle_fleet() -> None:
    """The figures of a request exclude the usage of an idle fleet in the same time.

    The idle usage per second is reported separately.
    """
    resting = Used(2.0, Side(0.2, 0), Side(0.4, 0), Side(0.02, 0))
    working = Used(3.0, Side(1.3, 0), Side(2.6, 0), Side(1.03, 0))

    figures = of_fleet(resting, Done(working, num_requests=1000, num_frames=2500))

    assert {name: round(value, 9) for name, value in figures.items()} == {
        "worker_ms": 1.0,
        "client_ms": 2.0,
        "server_ms": 1.0,
        "frames": 2.5,
        "worker_idle": 100.0,
        "client_idle": 200.0,
        "server_idle": 10.0,
    }


@pytest.mark.slow
async def test_cpu_time_and_memory_are_measured_for_each_side() -> None:
    """The benchmark counts the requests of all clients, and measures CPU time and memory of each side separately."""
    async with started_fleet(2, 2, SyntheticConfig()) as fleet:
        done = await work(fleet, 20, 4, 10)

    assert done.num_requests == 40
    assert done.num_frames > 0
    assert all(side.cpu_s > 0 and side.rss_bytes > 0 for side in done.used.sides.values())
