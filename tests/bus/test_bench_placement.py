"""`bench.placement`: every placement policy completes the same trace, and the reported figures match the run."""

import argparse
from dataclasses import replace

import numpy as np
import pytest

from bench.placement import FLEETS, SIMULATED, SIMULATED_TRACES, run_fleet, simulate
from bench.placement_sim import EngineShape, Simulation
from bench.placement_traces import Shape, block_keys, least_computed, make_trace
from bench.placement_ways import WAYS
from bench.report import Report
from rollbus.frontend.cli.tables import Spread

ENGINE = EngineShape(slots=16)
SHAPE = Shape(slots=64, busy=0.75, rounds=2, long=64)


def test_the_least_work_is_that_of_one_unlimited_cache() -> None:
    """The least work is that of one unlimited cache.

    It shares whole blocks, never the last prompt token, and also generated tokens that a later prompt contains.
    """
    prompt = np.arange(40, dtype=np.int32)
    other = np.concatenate([prompt, np.arange(100, 120, dtype=np.int32)])

    assert len(block_keys(prompt, 8)) == 4
    assert least_computed([(prompt, [prompt])], 8) == 40
    assert least_computed([(prompt, [prompt] * 3)], 8) == 40 + 2 * 8
    assert least_computed([(prompt, [other]), (other, [other])], 8) == 40 + (60 - 56)


@pytest.mark.parametrize("way", SIMULATED)
@pytest.mark.parametrize("name", SIMULATED_TRACES)
def test_every_policy_completes_every_simulated_trace(name: str, way: str) -> None:
    """In a simulation, each sample of each turn ends once, and no engine computes less than the minimum."""
    trace = make_trace(name, SHAPE)
    played = Simulation(trace, SIMULATED[way](), ENGINE, 4)
    played.run()

    assert len(played.jobs) == sum(one.samples * len(one.turns) for one in trace.conversations)
    assert all(job.arrived_at <= job.admitted_at <= job.first_at <= job.ended_at for job in played.jobs)
    computed = sum(engine.prefilled for engine in played.engines.values())
    assert computed == sum(len(job.prompt) - job.cached for job in played.jobs)
    assert computed >= least_computed(((job.prompt, [job.sequence]) for job in played.jobs), ENGINE.block_tokens)


@pytest.mark.parametrize("name", ["groups", "group-ids", "agents"])
def test_placement_computes_each_group_and_each_turn_about_once(name: str) -> None:
    """If the fleet has some free slots, placement computes each group and each turn about once."""
    trace = make_trace(name, replace(SHAPE, rounds=4))

    assert simulate(trace, "ours", 4, ENGINE)["computed"] < 1.1
    assert simulate(trace, "queue", 4, ENGINE)["computed"] > 2


@pytest.mark.parametrize("name", ["nothing", "tails", "slow-nothing"])
def test_placement_places_nothing_if_no_work_can_be_saved(name: str) -> None:
    """If placement cannot save work, it places nothing and takes as long as the queue alone."""
    trace = make_trace(name, SHAPE)
    ours, queue = simulate(trace, "ours", 4, ENGINE), simulate(trace, "queue", 4, ENGINE)

    assert ours["placed_percent"] == 0
    assert (ours["p99_s"], ours["wait_s"]) == (queue["p99_s"], queue["wait_s"])


@pytest.mark.slow
async def test_every_policy_completes_a_trace_on_a_bus() -> None:
    """Every policy completes a trace on a bus with synthetic engines and reports all columns."""
    fleet = replace(FLEETS["synthetic"], shape=Shape(slots=16, rounds=1, prompt_tokens=512, short=2))
    report = Report("placement")
    args = argparse.Namespace(traces=["groups"], ways=list(WAYS), rounds=1)
    await run_fleet(fleet, 2, args, report)

    rows = {row["way"]: row for row in report.rows}
    assert rows.keys() == set(WAYS)
    for row in rows.values():
        assert isinstance(row["computed"], Spread)
        assert row["computed"].median >= 1
    placed = rows["ours"]["placed_percent"]
    assert isinstance(placed, Spread)
    assert placed.median > 0
    assert rows["queue"]["placed_percent"] == Spread(0, 0, 0)


@pytest.mark.slow
async def test_a_kill_an_update_and_a_flood_lose_no_token() -> None:
    """The killed worker is replaced, all workers get the weights, and both clients get all tokens of each sample."""
    fleet = replace(FLEETS["synthetic"], shape=Shape(slots=16, rounds=1, prompt_tokens=512, short=2, long=4))
    report = Report("placement")
    args = argparse.Namespace(traces=["race", "aside"], ways=["queue", "ours"], rounds=1)
    await run_fleet(fleet, 2, args, report)

    assert [(row["trace"], row["way"]) for row in report.rows] == [
        (trace, way) for trace in ("mixed, with faults", "beside a flood") for way in ("queue", "ours")
    ]
    assert [row["lost"] for row in report.rows] == [Spread(0, 0, 0)] * 4
