"""`rollbus experts`: the map, its figures, and its notes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rollbus.frontend.cli.app import main
from rollbus.frontend.cli.exits import ExitCode
from rollbus.frontend.cli.watch.experts import LEGEND, map_lines
from rollbus.schemas.options import pip_install
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.cli.support import run_rollbus
from tests.support.expert_counts import asked_until, planes_of
from tests.support.fleet import StartServed, synthetic_worker
from tests.support.hand_control import controlled
from tests.support.requests import sized


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
        shown = await run_rollbus(nats_url, fleet, "experts", "--worker", "w0")
        versions = await run_rollbus(nats_url, fleet, "experts", "--versions", "--plane", "prompt")
        asked = await run_rollbus(nats_url, fleet, "experts", "--json", "--png", str(tmp_path / "map.png"))

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
