"""The seam between a worker and the engine inside it.

An engine is shaped by steps: it takes requests one at a time and hands over what one step produced for
all of them. The worker above owns identity, admission and transport; the engine owns scheduling and sampling.
Every request that `add` accepted ends with exactly one `RequestStep` that has `finish_reason` set, unless
the engine dies, which `steps` reports by raising `EngineDead`.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from bus.protocol.step import RequestStep
from schemas.presence import Capabilities
from schemas.request import GenerateRequest

__all__ = ["Engine", "RequestStep"]


class Engine(Protocol):
    """One inference engine. All methods are called from one event loop."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; valid once `start` has returned."""

    async def start(self) -> None:
        """Load the model and warm up, so that the first real request is as fast as the others.

        Raises:
            EngineDead: the engine could not be started; the message says why.
        """

    async def add(self, key: str, request: GenerateRequest) -> None:
        """Submit `request`, whose `sampling.n` is 1, under the engine-unique `key`.

        `request` has passed the worker's checks against `capabilities`.

        Raises:
            InvalidRequest: a parameter that this engine refuses; nothing was submitted.
            EngineDead: the engine is gone.
        """

    async def abort(self, keys: Sequence[str]) -> None:
        """End these requests with a `RequestStep` of finish reason ABORT each; unknown keys are ignored."""

    def steps(self) -> AsyncIterator[Sequence[RequestStep]]:
        """Yield what each engine step produced; called once.

        Raises:
            EngineDead: the engine died; every open request is lost.
        """

    async def close(self) -> None:
        """Stop the engine and every process it started; safe to call twice and after a failed `start`."""
