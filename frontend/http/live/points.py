"""One point of the history, made of what is known of the fleet."""

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
    """How long this service's requests waited in the queue from one step to the next."""

    def __init__(self) -> None:
        # By model: how many, and their seconds together.
        self._before: dict[str, tuple[int, float]] = {}

    def __repr__(self) -> str:
        """One line with the models."""
        return f"<QueueWaits {sorted(self._before)}>"

    def step(self, waits: Mapping[str, Durations]) -> tuple[float, dict[str, float]]:
        """Return the means since the last step, of all models together and of each; NaN without a request."""
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
    """Return how many requests a worker has that its engine has not begun."""
    return worker.queued + (0 if worker.engine_stats is None else worker.engine_stats.waiting or 0)


def worker_points(
    heard: Heard, queues: Iterable[QueueDepth], waits: tuple[float, Mapping[str, float]]
) -> tuple[Point, dict[str, Point], dict[str, Point]]:
    """Make the points of one step: of the fleet, of each model, and of each worker.

    Args:
        waits: mean seconds in the queue, of the fleet and by model.
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
