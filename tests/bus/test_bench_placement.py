"""`bench.placement`: every placement policy completes the same trace, and the reported figures match the run."""

from dataclasses import replace

import pytest

from bench.placement import SIMULATED, SIMULATED_TRACES, simulate
from bench.placement_sim import EngineShape, Simulation
from bench.placement_traces import Shape, least_computed, make_trace

ENGINE = EngineShape(slots=16)
SHAPE = Shape(slots=64, busy=0.75, rounds=2, long=64)


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "ours") for name in SIMULATED_TRACES), *(("mixed", way) for way in SIMULATED)],
)
def test_every_policy_completes_every_simulated_trace(name: str, way: str) -> None:
    """In a simulation, each sample of each turn ends once, and no engine computes less than the minimum."""
    # Sessions have many turns, and fill few slots.
    slots = 2 if name in {"sessions", "crowd"} else 8
    trace = make_trace(name, replace(SHAPE, slots=4 * slots))
    played = Simulation(trace, SIMULATED[way](), replace(ENGINE, slots=slots), 4)
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
def test_a_fleet_full_of_sessions_uses_its_caches_and_starves_no_request() -> None:
    """Turns of sessions compute half as many tokens as through the queue, and no request waits much longer."""
    shape, trace = EngineShape(slots=4, cache_tokens=100_000), make_trace("sessions", Shape(slots=8, long=64))
    ours, queue = simulate(trace, "ours", 2, shape), simulate(trace, "queue", 2, shape)

    assert ours["computed"] < 0.7 * queue["computed"]
    assert ours["tokens_per_s"] > 1.05 * queue["tokens_per_s"]
    assert ours["wait_s"] < 1.5 * queue["wait_s"]
