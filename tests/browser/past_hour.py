"""A synthetic hour of history, for screenshots of the throughput view."""

import math
from collections.abc import Iterator, Mapping

import pytest

from rollbus.bus.protocol.telemetry.rates import History, Point
from rollbus.frontend.http.live import fleet as live_fleet

POINTS = 715
PAUSES = (240, 480)
"""Indexes of the points that follow an update of the weights."""


def _points() -> Iterator[Point]:
    for i in range(POINTS):
        since = min(i - pause for pause in (0, *PAUSES) if i >= pause)
        up = 1 - math.exp(-since / 4)
        wave = 1 + 0.06 * math.sin(i / 23) + 0.03 * math.sin(i / 3.1)
        yield Point(
            tokens_per_s=9400 * wave * up,
            first_token_s=0.21 * wave + 0.9 * (1 - up),
            between_tokens_s=0.031 * wave,
            queue_wait_s=0.12 * wave + 2.5 * (1 - up),
            waiting=round(40 * wave + 300 * (1 - up)),
            in_flight=round(620 * up * wave),
        )


def remember_an_hour(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Give each service that starts from now on an hour of history of one model, followed by its real points."""

    class Past(History):
        def __init__(self) -> None:
            super().__init__()
            for number, point in enumerate(_points(), 1 - POINTS):
                self.add(number, point, {model: point}, {})

        def add(self, number: int, fleet: Point, models: Mapping[str, Point], workers: Mapping[str, Point]) -> None:
            super().add(POINTS + number, fleet, models, workers)

    time_of = live_fleet.LiveFleet.time_of
    monkeypatch.setattr(live_fleet, "History", Past)
    monkeypatch.setattr(live_fleet.LiveFleet, "time_of", lambda live, number: time_of(live, number - POINTS))
