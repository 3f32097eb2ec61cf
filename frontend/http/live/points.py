"""One point of the history, from the state of the fleet."""

import math
from collections.abc import Iterable, Mapping

from ....bus import QueueDepth
from ....bus.client.durations import Durations
from ....bus.protocol.telemetry.fleet_rates import Rates
from ....bus.protocol.telemetry.series import Point
from ....schemas.presence import WorkerPresence
from .heard import Heard

__all__ = ["QueueWaits", "waiting_at", "worker_points"]


class QueueWaits:
    """Mean time that this service's requests waited in the queue, for each step."""

    def __init__(self) -> None:
        # By model: number of requests and their total seconds.
        self._before: dict[str, tuple[int, float]] = {}

    def __repr__(self) -> str:
        """Return one line with the models."""
        return f"<QueueWaits {sorted(self._before)}>"

    def step(self, waits: Mapping[str, Durations]) -> tuple[float, dict[str, float]]:
        """Return the mean seconds since the last step, over all models and for each model; NaN without a request."""
        now = {model: (sum(durations.counts), durations.total_s) for model, durations in waits.items()}
        news = {model: _since(found, self._before.get(model, (0, 0.0))) for model, found in now.items()}
        self._before = now
        total = sum(count for count, _ in news.values()), sum(seconds for _, seconds in news.values())
        return _mean(*total), {model: _mean(*found) for model, found in news.items()}


def _since(now: tuple[int, float], before: tuple[int, float]) -> tuple[int, float]:
    return now[0] - before[0], now[1] - before[1]


def _mean(count: int, seconds: float) -> float:
    return seconds / count if count > 0 else math.nan


def waiting_at(worker: WorkerPresence) -> int:
    """Return the number of requests that a worker has accepted and its engine has not started."""
    return worker.queued + (0 if worker.engine_stats is None else worker.engine_stats.waiting or 0)


def worker_points(
    heard: Heard, queues: Iterable[QueueDepth], waits: tuple[float, Mapping[str, float]]
) -> tuple[Point, dict[str, Point], dict[str, Point]]:
    """Return the points of one step: for the fleet, for each model and for each worker.

    Args:
        waits: mean seconds in the queue, for the fleet and by model.
    """
    presences = [each.presence for each in heard.workers.values()]
    in_queue: dict[str, int] = {}
    for depth in queues:
        in_queue[depth.model] = in_queue.get(depth.model, 0) + depth.waiting
    waiting = {worker.model: in_queue.get(worker.model, 0) for worker in presences}
    in_flight = dict.fromkeys(waiting, 0)
    workers = {}
    for worker in presences:
        waiting[worker.model] += waiting_at(worker)
        in_flight[worker.model] += worker.in_flight
        rates = heard.rates.of(worker.worker)
        workers[worker.worker] = _point(rates, math.nan, waiting_at(worker), worker.in_flight)
    fleet_wait, waits_by_model = waits
    rates_by_model = heard.rates.of_models()
    models = {
        model: _point(
            rates_by_model.get(model, Rates()), waits_by_model.get(model, math.nan), waiting[model], in_flight[model]
        )
        for model in waiting
    }
    fleet = _point(heard.rates.of_fleet(), fleet_wait, sum(waiting.values()), sum(in_flight.values()))
    return fleet, models, workers


def _point(rates: Rates, queue_wait_s: float, waiting: int, in_flight: int) -> Point:
    return Point(
        tokens_per_s=rates.tokens_per_s,
        first_token_s=_known(rates.first_token_s),
        between_tokens_s=_known(rates.between_tokens_s),
        queue_wait_s=queue_wait_s,
        waiting=waiting,
        in_flight=in_flight,
    )


def _known(value: float | None) -> float:
    return math.nan if value is None else value
