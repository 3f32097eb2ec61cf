"""A short version of `make soak`, and tests that the meter detects growth."""

import itertools
from pathlib import Path

import pytest

from tests.soak.meter import BOUNDS, MIB, Meter
from tests.soak.run import PARTS, Settings, plan, run
from tests.support.nats_server import require_binary

SETTINGS = Settings(
    seconds=36, warm_up_s=12, look_every_s=1, seconds_between_versions=3, pace=0.35, in_flight=2, step_s=0.02, seed=3
)


@pytest.mark.proves("P10")
@pytest.mark.slow
async def test_nothing_grows_while_everything_is_killed(tmp_path: Path) -> None:
    """While servers, workers, clients, services and publishers die, each result is right, and no memory grows."""
    require_binary()
    said: list[str] = []
    summary = await run(SETTINGS, tmp_path, log=tmp_path / "processes.log", say=said.append)

    assert [str(trend) for trend in summary.trends if not trend.is_flat] == []
    assert {trend.name.partition(" ")[0] for trend in summary.trends} == BOUNDS.keys()
    assert {*summary.results} == {"whole", "stream", "session", "group", "http"}
    assert summary.faults.total() == len(said) >= 5
    assert summary.num_versions > 1


def test_the_faults_follow_from_the_seed() -> None:
    """The same seed gives each part the same faults; another seed, or another part, gives others of all its kinds."""
    some = {(seed, part): [*itertools.islice(plan(seed, part), 200)] for seed in (1, 2) for part in PARTS}
    for (seed, part), faults in some.items():
        assert faults == [*itertools.islice(plan(seed, part), 200)]
        assert {fault.kind for fault in faults} == PARTS[part][1].keys()
        assert all(other != faults for name, other in some.items() if name != (seed, part))


@pytest.mark.parametrize(("mib", "count"), [(0, 0), (BOUNDS["worker"].mib + 1, 0), (0, 7)])
def test_growth_above_the_beginning_is_detected(mib: float, count: int) -> None:
    """Memory or file descriptors above those of the beginning are growth. A peak in the middle is not."""
    meter = Meter()
    for number in range(12):
        rss_mib = 50 + 500 * (number == 5) + mib * (number > 7)
        meter.add("worker w1", int(MIB * rss_mib), 10 + count * (number > 7))
    [trend] = meter.trends()

    assert trend.is_flat != (mib > 0 or count > 0)
    assert [*trend.mib, *trend.counts] == [50, 50 + mib, 10, 10 + count]
