"""Decides how long requests wait for a worker while no worker serves their model.

A request waits for a worker that is paused, updates its weights or starts. If there is no such worker, it waits for the
grace time, in which a supervisor may start one. The caller passes in the time; nothing here waits.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .fleet_snapshot import FleetSnapshot

__all__ = ["UnservedModels", "WaitLimit"]


class WaitLimit(NamedTuple):
    """How long a request of an HTTP client waits while no worker serves its model."""

    since: float
    """Time at which the request arrived, on `time.monotonic()`."""
    seconds: float
    waited_s: float = 0.0
    """Seconds of the limit that had passed before: the model had no worker that had started."""


class UnservedModels:
    """The models with waiting requests that no worker serves, and since when.

    Args:
        grace_s: seconds that requests wait for a worker of a model that no worker serves and none starts.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._fleet = FleetSnapshot(())
        # By model with waiting requests: the time since which no worker runs requests, and since which none is awaited.
        self._idle: dict[str, float] = {}
        self._abandoned: dict[str, float] = {}

    def __repr__(self) -> str:
        """Return one line with the models."""
        return f"<UnservedModels idle={list_models(self._idle)} abandoned={list_models(self._abandoned)}>"

    def update(self, models: Iterable[str], fleet: FleetSnapshot, now: float) -> None:
        """Follow the workers of `models`, the models with waiting requests."""
        self._fleet = fleet
        idle = {model for model in models if model not in fleet.serving}
        self._idle = {model: self._idle.get(model, now) for model in idle}
        self._abandoned = {model: self._abandoned.get(model, now) for model in idle if model not in fleet.awaited}

    def restart_timers(self) -> None:
        """Restart all times: no presence could arrive while this process was disconnected."""
        self._idle.clear()
        self._abandoned.clear()

    def why_not_wait(self, model: str, limit: WaitLimit | None, now: float, *, has_grace: bool = True) -> str | None:
        """Return the reason why a request that no worker has must fail now; None: it waits.

        Args:
            limit: limit of this request; None: it waits until its deadline.
            has_grace: False: the grace time has passed in another way.
        """
        others = self._fleet.describe_others(model)
        since = self._abandoned.get(model)
        if since is not None and model in self._fleet.given_up:
            return f"no worker serves {model}, and none starts{others}"
        if since is not None and (not has_grace or now - since >= self._grace_s):
            return f"no worker has served {model} for {self._grace_s:g} s{others}"
        since = self._idle.get(model)
        if since is not None and limit is not None and now - max(since, limit.since) + limit.waited_s >= limit.seconds:
            return f"no worker has served {model} for {limit.seconds:g} s{others}"
        return None


def list_models(since: dict[str, float]) -> str:
    """Return the models as one word."""
    return ",".join(since) or "none"
