"""A short version of `make soak`, and tests that the meter detects growth."""

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rollbus.schemas.errors import BusBroken
from tests.soak.meter import BOUNDS, MIB, Meter
from tests.soak.run import PARTS, Course, Settings, plan, run
from tests.support.nats_server import require_binary
from tests.support.waits import SOON_S, until_true

SETTINGS = Settings(
    seconds=36.0, warm_up_s=12.0, look_every_s=1.0, seconds_between_versions=3.0, pace=0.35, in_flight=5, seed=3
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


async def test_a_command_is_not_repeated_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that fails is repeated only until the run ends, so that a fault cannot keep a run from its end."""

    async def fail(**_: object) -> None:
        raise BusBroken("no server")

    monkeypatch.setattr("tests.soak.run.COMMAND_S", 0.0)
    rb: Any = SimpleNamespace(fleet=SimpleNamespace(pause=fail, resume=fail, flush_cache=fail))
    others: list[Any] = [SimpleNamespace()] * 4
    course = Course(Settings(), rb, *others)
    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(course.command())
        await until_true(lambda: course.refusals["command BusBroken"] > 1)
        course.end()


class Growing:
    """Simulates a process that uses more from its ninth measurement on, and has a peak in its sixth."""

    def __init__(self, rss_mib: float, num_fds: int) -> None:
        self._more = rss_mib, num_fds
        self._looks = 0

    def memory_info(self) -> SimpleNamespace:
        """Return the memory, which each measurement reads first."""
        self._looks += 1
        return SimpleNamespace(rss=MIB * (50 + 500 * (self._looks == 6) + self._more[0] * (self._looks > 8)))

    def num_fds(self) -> int:
        """Return the number of file descriptors, which each measurement reads second."""
        return 10 + self._more[1] * (self._looks > 8)


@pytest.mark.parametrize(("rss_mib", "num_fds"), [(0, 0), (BOUNDS["worker"].mib + 1, 0), (0, 7)])
def test_growth_above_the_beginning_is_detected(monkeypatch: pytest.MonkeyPatch, rss_mib: float, num_fds: int) -> None:
    """Memory or file descriptors above those of the beginning are growth. A peak in the middle is not."""
    growing = Growing(rss_mib, num_fds)
    monkeypatch.setattr(psutil, "Process", lambda _pid: growing)
    meter = Meter()
    for _ in range(12):
        meter.look({"worker w1": 1})
    [trend] = meter.trends()

    assert trend.is_flat != (rss_mib > 0 or num_fds > 0)
    assert [*trend.mib, *trend.counts] == [50, 50 + rss_mib, 10, 10 + num_fds]


def test_too_few_measurements_are_an_error() -> None:
    """A run with too few measurements raises an error and does not count as flat."""
    meter = Meter()
    for _ in range(8):
        meter.look({"client c0": psutil.Process().pid})

    with pytest.raises(ValueError, match="8 looks; needed are 9"):
        meter.trends()
