"""A short version of `make soak`, and tests that the meter detects growth."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.soak.meter import BOUNDS, MIB, Meter
from tests.soak.run import Settings, run
from tests.support.nats_server import require_binary

SETTINGS = Settings(
    seconds=36.0, warm_up_s=12.0, look_every_s=1.0, seconds_between_faults=4.0, max_in_flight=24, seed=3
)


@pytest.mark.proves("P10")
@pytest.mark.slow
async def test_no_process_grows_during_faults(tmp_path: Path) -> None:
    """Under faults, each result equals the undisturbed one, and no process that survives the run grows."""
    require_binary()
    said: list[str] = []
    with (tmp_path / "workers.log").open("wb") as log:
        summary = await run(SETTINGS, stderr=log.fileno(), say=said.append)

    assert [str(trend) for trend in summary.trends if not trend.is_flat] == []
    assert {trend.name for trend in summary.trends} == {"client", "server", "worker w1", "worker w2"}
    assert summary.num_results > 300
    assert summary.num_commands > 2
    assert summary.faults.total() == len(said) >= 5


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


@pytest.mark.parametrize(("rss_mib", "num_fds"), [(0, 0), (BOUNDS["worker"].rss_mib + 1, 0), (0, 3)])
def test_growth_above_the_beginning_is_detected(monkeypatch: pytest.MonkeyPatch, rss_mib: float, num_fds: int) -> None:
    """Memory or file descriptors above those of the beginning are growth. A peak in the middle is not."""
    monkeypatch.setattr(psutil, "Process", lambda _pid: Growing(rss_mib, num_fds))
    meter = Meter({"worker w1": 1})
    for _ in range(12):
        meter.look()
    [trend] = meter.trends()

    assert trend.is_flat != (rss_mib > 0 or num_fds > 0)
    assert [*trend.rss_mib, *trend.num_fds] == [50, 50 + rss_mib, 10, 10 + num_fds]


def test_too_few_measurements_are_an_error() -> None:
    """A run with too few measurements raises an error and does not count as flat."""
    meter = Meter({"client": psutil.Process().pid})
    for _ in range(8):
        meter.look()

    with pytest.raises(ValueError, match="8 looks; needed are 9"):
        meter.trends()
