"""Completion times of a batch: of most of its requests, and of the slowest ones, which delay a training step."""

import math
from array import array
from typing import Final

__all__ = ["PERCENTS", "BatchTimes"]

PERCENTS: Final = (50, 90, 99, 100)
"""Percentages of a batch's requests in `percentiles`."""
MAX_TIMES: Final = 65_536
"""Maximum number of stored times (512 KiB). A batch twice as large stores every second request, and so on."""


class BatchTimes:
    """Seconds from the start of a batch until given percentages of its requests were complete.

    Pass an instance to `Client.complete_many`, and read it at any time from the same event loop:

        times = rollbus.BatchTimes()
        async for generation in rb.complete_many(requests, times=times):
            ...
        print(times.percentiles())  # {50: 3.1, 90: 7.4, 99: 12.0, 100: 14.2}

    A batch starts when its first result is requested. A request is complete when it has ended, with or without an
    error, also if the caller has not read its result. Percentages count only requests that are complete. If a batch is
    still running or was left early, they do not cover all its requests. Each new batch resets the times.
    """

    def __init__(self) -> None:
        self.start(0.0)

    def __repr__(self) -> str:
        """Return one line with the times."""
        times = " ".join(f"{percent}%:{seconds:.3f}s" for percent, seconds in self.percentiles().items())
        return f"<BatchTimes complete={self._num_complete} {times or 'empty'}>"

    @property
    def num_complete(self) -> int:
        """Number of requests of the batch that have ended."""
        return self._num_complete

    def start(self, now: float) -> None:
        """Start a batch at `now` and discard the times of the previous batch. `complete_many` calls this."""
        self._started_at = now
        self._num_complete = 0
        self._last_s = 0.0
        self._step = 1
        # Entry k is the completion time of request number (k + 1) * _step.
        self._times_s = array("d")

    def add(self, now: float) -> None:
        """Count a request that was complete at `now`. `complete_many` calls this.

        If later completion times were already added, the request counts as complete at the latest of them.
        """
        self._num_complete += 1
        self._last_s = max(self._last_s, now - self._started_at)
        if self._num_complete % self._step:
            return
        self._times_s.append(self._last_s)
        if len(self._times_s) >= MAX_TIMES:
            self._times_s = self._times_s[1::2]
            self._step *= 2

    def seconds_to(self, percent: float) -> float | None:
        """Return the seconds until this percentage of the requests was complete, or None if no request is.

        The value is exact for up to 65,535 requests. For larger batches it is the time of a request that was complete
        shortly after.

        Raises:
            ValueError: `percent` is not above 0 and at most 100.
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percent is {percent}; allowed: above 0, up to 100")
        if not self._num_complete:
            return None
        number = max(math.ceil(self._num_complete * percent / 100), 1)
        index = math.ceil(number / self._step) - 1
        return self._times_s[index] if index < len(self._times_s) else self._last_s

    def percentiles(self) -> dict[int, float]:
        """Return the seconds until 50, 90, 99 and 100 % of the requests were complete, by percentage."""
        times = ((percent, self.seconds_to(percent)) for percent in PERCENTS)
        return {percent: seconds for percent, seconds in times if seconds is not None}
