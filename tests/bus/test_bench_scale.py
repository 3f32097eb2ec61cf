"""`bench.scale`: its figures are what its processes did, and docs/scaling.md says what they are."""

import json
from pathlib import Path

import pytest

from bench.report import shown_argument
from bench.scale import Work as Done
from bench.scale import of_fleet, work
from bench.scale_fleet import Side, Used, started_fleet
from bench.scale_paper import DOC, MODELS, RESULTS, frame_bytes, with_tables
from rollbus.workers.engines.synthetic import SyntheticConfig


def test_the_page_has_the_figures() -> None:
    """The tables of docs/scaling.md are those that the figures beside it and the wire give."""
    text = DOC.read_text()

    assert with_tables(text, json.loads(RESULTS.read_text())) == text


def test_a_recorded_command_names_no_folder_of_its_machine() -> None:
    """Paths in the checkout are relative to it, others are below `DIR`; no result file has an absolute path."""
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


def test_a_frame_has_the_rows_of_its_tokens() -> None:
    """What a token takes with routing, beyond what it takes without, is its row and a few bytes."""
    for model in MODELS:
        routing = frame_bytes(model) - frame_bytes(model, routed=False)
        assert model.row_bytes <= routing / model.in_flight < model.row_bytes + 16


def test_a_request_is_not_charged_for_the_fleet() -> None:
    """What an idle fleet would have used in the time is taken off, and what it uses a second is told."""
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
async def test_each_side_is_told_apart() -> None:
    """All requests of all clients are counted, and each side has used CPU of its own for them."""
    async with started_fleet(2, 2, SyntheticConfig()) as fleet:
        done = await work(fleet, 20, 4, 10)

    assert done.num_requests == 40
    assert done.num_frames > 0
    assert all(side.cpu_s > 0 and side.rss_bytes > 0 for side in done.used.sides.values())
