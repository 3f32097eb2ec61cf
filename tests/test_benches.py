"""Each bench runs, here with tiny loads: `python -m bench` measures for more than an hour, and nothing else runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import BENCHES
from bench.compare import is_worse
from bench.profile import flame_graph, read_stacks
from tests.support.processes import ROOT
from tests.support.waits import SOON_S

SMALL = {
    "accounts": "--loads 2x4 --frames 10 --rounds 1",
    "control": "--workers 1 --rounds 1",
    "experts": "--tokens-per-s 100 --rounds 1",
    "flood": "--flood 20 --samples 2",
    "http": "--engines synthetic --loads 2x4 --rounds 1",
    "http_memory": "--megabytes 1 --rounds 1",
    "latency": "--concurrency 100 --rounds 1",
    "objects": "--megabytes 1 --peer-megabytes 1 --rounds 1",
    "viewers": "--viewers 1 --seconds 0.2 --rounds 1",
}
"""Options with which a bench takes seconds."""
ELSEWHERE = {
    "costs": "tests/test_instructions.py",
    "instructions": "tests/test_instructions.py",
    "placement": "tests/bus/test_bench_placement.py",
    "routing": "tests/bus/test_bench_routing.py",
    "scale": "tests/bus/test_bench_scale.py",
    "trainer": "tests/trainer/test_bench.py",
    "transport": "tests/engine/test_transport_bench.py",
    "weights": "tests/engine/test_weights_bench.py",
}
"""Files with a short run of a bench."""
WITH_ENGINE = {"real_engine", "rollouts", "steps"}
"""Benches that need a real engine for minutes. docs/performance.md has the commit of their last run."""


@pytest.mark.slow
@pytest.mark.parametrize("bench", SMALL)
def test_a_bench_writes_its_figures(bench: str, tmp_path: Path) -> None:
    """A bench with tiny loads ends with code 0 and writes figures."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"bench.{bench}", *SMALL[bench].split(), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SOON_S)

    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(file.read_text())


def test_a_figure_is_worse_if_its_best_round_is_worse_than_the_other_commits_worst() -> None:
    """More tokens per second and fewer milliseconds are better. Overlapping rounds and other units are no verdict."""
    cases = {
        "tokens_per_s": ([8.0, 9.9], [9.0, 10.1]),
        "times_sse": ([8.0, 9.9], [9.0, 10.1]),
        "cpu_ms": ([12.1, 14.0], [11.9, 14.0]),
        "instructions": ([11.4], [11.3]),
    }
    for column, (worse, as_good) in cases.items():
        assert is_worse(column, [10.0, 12.0], worse)
        assert not is_worse(column, [10.0, 12.0], as_good)
    assert not is_worse("chunks", [10.0], [1.0])


def test_a_flame_graph_has_a_box_for_each_function_with_enough_samples() -> None:
    """Samples of one function count together, whatever the line. Functions below half a percent are left out."""
    calls = read_stacks("t;Runner.run (r.py:1);a (x.py:1);b (x.py:2) 90\nt;Runner.run (r.py:1);a (x.py:3) 110\nt;c 1\n")
    picture = flame_graph(calls, "client")

    assert "<title>a (x.py) 99.5%</title>" in picture
    assert "<title>b (x.py) 44.8%</title>" in picture
    assert picture.count("<title>") == 3


def test_each_bench_has_a_short_run() -> None:
    """Each program of `python -m bench` has a short run in CI, except those that need an engine for minutes."""
    assert set(BENCHES) - SMALL.keys() - ELSEWHERE.keys() == WITH_ENGINE
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).is_file()] == []
    for bench in WITH_ENGINE:
        assert f"`python -m bench.{bench} " in (ROOT / "docs/performance.md").read_text()
