"""The requests in flight of a worker: pausing, aborting and restarting them, and holding the steps made of them.

The caller decides that requests must stop, and first takes the worker out of `serving`, so that no more come in.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from ...bus.protocol.stream.engine_step import split
from ...bus.queue.puller import QueuePuller
from ...schemas.chunk import FinishReason
from ...schemas.control import PauseMode
from ...schemas.errors import ControlCode, ControlError, ErrorCode, RequestError
from ...schemas.request import GenerateRequest
from ..engines.engine import RequestStep, TokenBatch
from ..engines.engine_runner import EngineRunner
from .intake import RequestIntake
from .links import WorkerLinks
from .worker_requests import Instructions

__all__ = ["InFlightRequests"]

logger = logging.getLogger(__name__)

NO_TOKENS = np.empty(0, np.int32)
GATHER_S = 0.1
"""How long tokens are gathered whose clients take results whole: a few steps of a large model, and what a worker that
dies costs at most on top."""


class InFlightRequests:
    """The requests in a worker's engine, and the steps that the engine makes of them.

    Every coroutine raises `EngineDead` if the engine is gone. Where a method takes `lora`, it acts on the open requests
    that use this adapter; None: on all.

    Args:
        execute: executes instructions, and has sent what there is to send.
    """

    def __init__(
        self,
        runner: EngineRunner,
        links: WorkerLinks,
        intake: RequestIntake,
        puller: QueuePuller,
        *,
        execute: Callable[[Instructions], None],
    ) -> None:
        self.runner = runner
        self.links = links
        self._intake = intake
        self._puller = puller
        self._execute = execute
        self._changed = asyncio.Event()
        # With no more of a request than it may still generate; None: steps go on to the links.
        self._held_steps: list[RequestStep] | None = None
        # The worker's own requests, of which there is one at a time.
        self._own: dict[str, list[RequestStep]] = {}
        self._num_own = 0
        self._gather_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """One line with counts."""
        num_held = None if self._held_steps is None else len(self._held_steps)
        is_paused = self.runner.is_engine_paused
        return f"<InFlightRequests count={self.count} paused={is_paused} held={num_held} own={len(self._own)}>"

    @property
    def count(self) -> int:
        """Requests that are open towards their clients, or that the engine still has."""
        return max(len(self.links.requests), self.runner.num_inside)

    async def stop(self, mode: PauseMode, timeout_s: float, reason: str = "pause") -> None:
        """Accept no more, and pause, finish or abort the requests in flight; from any mode to any other.

        Afterwards, by `mode`: `keep`, the engine is paused, and all that was sampled before is in the links; `wait`
        and `abort`, the engine runs, and nothing is in flight.

        Args:
            reason: what timelines say that a pause is for.

        Raises:
            ControlError: `timeout`, with the number in flight; still nothing is accepted, and requests go on.
        """
        self.stop_intake()
        try:
            async with asyncio.timeout(timeout_s):
                if mode == "keep":
                    await self.pause_engine(reason)
                    return
                # Held since weights were replaced under a pause: what is to end has to be delivered.
                self.release_steps()
                if mode == "abort":
                    self.abort(self.links.requests.names)
                await self.resume_engine()
                await self._until(lambda: not self.count)
        except TimeoutError:
            left = "the engine has not stopped" if mode == "keep" else f"{self.count} requests are in flight"
            problem = f"{left} after {timeout_s:.1f} s"
            raise ControlError(ControlCode.TIMEOUT, problem) from None

    def stop_intake(self) -> None:
        """Pull and accept no more requests; those that wait in the intake go back to the queue."""
        self._puller.pause()
        self._intake.nak_incoming()

    async def resume(self) -> None:
        """Release the held steps, resume the engine and pull requests again."""
        await self.resume_engine()
        self._puller.resume()

    async def resume_engine(self) -> None:
        """Release the held steps and resume the engine: the requests in flight go on."""
        self.links.requests.resume()
        self.release_steps()
        await self.runner.resume()

    async def pause_engine(self, reason: str = "pause") -> None:
        """Pause the engine; all that it has made is then in the links, or held. See `stop` for the reason."""
        await self.runner.pause()
        self.flush()
        self.links.requests.hold(reason)

    def hold_steps(self) -> None:
        """Hold the steps that the engine makes from now on."""
        if self._held_steps is None:
            self._held_steps = []

    def release_steps(self) -> None:
        """Give the links the held steps as if they were made now, with the present weight version."""
        held, self._held_steps = self._held_steps, None
        if held:
            self.add_steps(held)

    def discard_steps(self) -> None:
        """Discard the held steps; their requests end as `worker_fenced`, because they would have a gap."""
        held, self._held_steps = self._held_steps or [], None
        names = list({step.key for step in held})
        self._execute(self.links.fail(names, _fenced("what this worker made of it was not to be trusted")))

    async def run_alone(self, request: GenerateRequest, timeout_s: float) -> list[RequestStep]:
        """Have the running engine execute a request of the worker's own; its steps never reach a client.

        Cancellation: the engine is told to abort it.

        Raises:
            ControlError: `timeout`; `engine_error`, the engine refused or failed it.
        """
        self._num_own += 1
        # Clients' names begin with the client, which is never empty.
        key = f"/{request.request_id}/{self._num_own}"
        steps = self._own[key] = []
        try:
            async with asyncio.timeout(timeout_s):
                await self.runner.add(key, request)
                await self._until(lambda: bool(steps) and steps[-1].finish_reason is not None)
        except TimeoutError:
            raise ControlError(ControlCode.TIMEOUT, f"{request.request_id} took more than {timeout_s:g} s") from None
        except RequestError as exc:
            raise ControlError(ControlCode.ENGINE_ERROR, f"{request.request_id} was refused: {exc.message}") from exc
        finally:
            del self._own[key]
            self.runner.abort([key])
        if steps[-1].finish_reason is FinishReason.ERROR:
            raise ControlError(ControlCode.ENGINE_ERROR, f"{request.request_id} failed: {steps[-1].error}")
        return steps

    def add_steps(self, steps: Sequence[RequestStep | TokenBatch]) -> None:
        """Add the output of one engine step."""
        if self._own or self._held_steps is not None:
            self._divert_steps(split(steps))
        else:
            self._execute(self.links.add_steps(steps, time.monotonic()))
            if self._gather_timer is None and self.links.dispatcher.is_gathering:
                self._gather_timer = asyncio.get_running_loop().call_later(GATHER_S, self._end_gathering)
        self.wake_waiters()

    def _end_gathering(self) -> None:
        self._gather_timer = None
        self.flush()

    def flush(self) -> None:
        """Give the links all that was gathered."""
        self._execute(self.links.flush())

    def _divert_steps(self, steps: list[RequestStep]) -> None:
        """Give steps to the worker's own requests, and hold the others if steps are held."""
        if self._own:
            for step in steps:
                if step.key in self._own:
                    self._own[step.key].append(step)
            steps = [step for step in steps if step.key not in self._own]
        if self._held_steps is not None:
            self._held_steps.extend(steps)
        else:
            self._execute(self.links.add_steps(steps, time.monotonic()))

    def wake_waiters(self) -> None:
        """Wake what waits here: a request may have ended."""
        self._changed.set()

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()

    def abort(self, names: Sequence[str]) -> None:
        """End requests with ABORT, by their engine names; what was made of them before is delivered."""
        # Otherwise they would end with the next step that the engine makes of them, perhaps much later.
        meant = {name for name in names if self.runner.is_engine_paused or self.runner.is_fetching(name)}
        if meant:
            held = self._held_steps or []
            ends = [RequestStep(key=name, token_ids=NO_TOKENS, finish_reason=FinishReason.ABORT) for name in meant]
            steps = [*(step for step in held if step.key in meant), *ends]
            self._execute(self.links.add_steps(steps, time.monotonic()))
            if self._held_steps is not None:
                self._held_steps = [step for step in held if step.key not in meant]
        self._execute(Instructions(abort=list(names)))

    async def abort_and_wait(self, names: Sequence[str]) -> None:
        """Abort requests; on return a running engine does not have them any more."""
        self.abort(names)
        if not self.runner.is_engine_paused:
            await self._until(lambda: not self.runner.has_any(names))

    async def abort_all(self, timeout_s: float) -> None:
        """Abort all requests; on return none is in flight, also if the engine is paused.

        Raises:
            ControlError: `timeout`; towards clients all requests have ended.
        """
        self.abort(self.links.requests.names)
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self.count)
        except TimeoutError:
            problem = f"the engine has not let go of {self.count} aborted requests after {timeout_s:.1f} s"
            raise ControlError(ControlCode.TIMEOUT, problem) from None

    def fail_for_retry(self, reason: str) -> None:
        """End all that is in flight as `worker_fenced`: other workers go on with it."""
        if self.links.requests:
            logger.warning("flow.given_up requests=%s reason=%s", len(self.links.requests), reason)
        self.fail_using(None, reason)
        self.release_steps()

    def fail_using(self, lora: str | None, reason: str) -> None:
        """End requests as `worker_fenced`: other workers go on with them, as this one has lost what they use."""
        self._execute(self.links.fail(self.links.requests.names_using(lora), _fenced(reason)))

    def fail_awaiting_kv(self, lora: str | None, reason: str) -> None:
        """End prefill and decode phases without a token, to be run again: KV of different weights must not meet."""
        names = self.links.requests.names_awaiting_kv(lora)
        self._execute(self.links.fail(names, RequestError(code=ErrorCode.KV_TRANSFER_FAILED, message=reason)))

    async def restart(self, lora: str | None) -> None:
        """Have the paused engine restart requests without a token: their KV is to be of the new weights alone.

        The attempt stays the same, and clients do not notice: they have nothing of it yet.
        """
        names = self.links.requests.restart_unbegun(lora)
        if not names:
            return
        refused = await self.runner.restart(names)
        for request in filter(None, map(self.links.requests.open, set(names).difference(refused))):
            request.timeline.add("restarted", tokens=0)
        for name, error in refused.items():
            self._execute(self.links.fail([name], error))
        logger.info("requests.restarted count=%d refused=%d", len(names), len(refused))


def _fenced(reason: str) -> RequestError:
    return RequestError(code=ErrorCode.WORKER_FENCED, message=reason)
