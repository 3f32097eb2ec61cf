"""When the requests of a batch were complete: the first many, and the tail that a training step waits for."""

import math
from array import array
from typing import Final

__all__ = ["PERCENTS", "BatchTimes"]

PERCENTS: Final = (50, 90, 99, 100)
"""Of a batch's requests, as `percentiles` has them."""
MAX_TIMES: Final = 65_536
"""Times that are kept, in 512 KiB: of a larger batch every second request's, every fourth's and so on."""


class BatchTimes:
    """Seconds from the start of a batch until shares of its requests were complete.

    Pass one to `Client.complete_many`, and read it at any time from the same event loop:

        times = rollbus.BatchTimes()
        async for generation in rb.complete_many(requests, times=times):
            ...
        print(times.percentiles())  # {50: 3.1, 90: 7.4, 99: 12.0, 100: 14.2}

    A batch starts when its first result is asked for. A request is complete when it has ended, well or not, whether or
    not the caller has read its result. Shares are of the requests that are complete by now: while a batch is under way,
    or was left early, that is not all of it. Each batch starts the times anew.
    """

    def __init__(self) -> None:
        self.start(0.0)

    def __repr__(self) -> str:
        """One line with the times."""
        times = " ".join(f"{percent}%:{seconds:.3f}s" for percent, seconds in self.percentiles().items())
        return f"<BatchTimes complete={self._num_complete} {times or 'empty'}>"

    @property
    def num_complete(self) -> int:
        """Requests of the batch that have ended."""
        return self._num_complete

    def start(self, now: float) -> None:
        """Start a batch at this time, without the times of the batch before; called by `complete_many`."""
        self._started_at = now
        self._num_complete = 0
        self._last_s = 0.0
        self._step = 1
        # Entry k is the time of the request that was the number (k + 1) * _step to be complete.
        self._times_s = array("d")

    def add(self, now: float) -> None:
        """Count a request that was complete at this time; called by `complete_many`.

        One that comes late, behind later ones, counts as complete with the last of them.
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
        """Seconds until this share of the requests was complete; None if none is.

        Exact up to 65,535 requests; of larger batches it is the time of a request that was complete shortly after.

        Raises:
            ValueError: `percent` is not above 0 and up to 100.
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percent is {percent}; allowed: above 0, up to 100")
        if not self._num_complete:
            return None
        number = max(math.ceil(self._num_complete * percent / 100), 1)
        index = math.ceil(number / self._step) - 1
        return self._times_s[index] if index < len(self._times_s) else self._last_s

    def percentiles(self) -> dict[int, float]:
        """Seconds until 50, 90, 99 and 100 % of the requests were complete, by percent; empty if none is."""
        times = ((percent, self.seconds_to(percent)) for percent in PERCENTS)
        return {percent: seconds for percent, seconds in times if seconds is not None}
