"""Pauses, aborts and restarts the requests in flight of a worker, and holds their steps.

The caller decides when requests must stop. It first changes the state from `serving`, so that no more requests arrive.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch, split
from ...bus.queue.puller import QueuePuller
from ...schemas.chunk import FinishReason
from ...schemas.control import PauseMode
from ...schemas.errors import ControlCode, ControlError, ErrorCode, RequestError
from ...schemas.request import GenerateRequest
from ..engines.engine import EngineRunner
from .intake import RequestIntake
from .links import WorkerLinks
from .table import Instructions

logger = logging.getLogger(__name__)

NO_TOKENS = np.empty(0, np.int32)
GATHER_S = 0.1
"""Maximum seconds for which tokens of unstreamed requests are batched: a few steps of a large model. A worker that dies
loses at most this much more."""
COUNT_S = 0.005
"""Seconds between two parts of a long prompt whose experts are counted: frames come first, and 100,000 tokens a second
are counted."""


class InFlightRequests:
    """The requests in a worker's engine, and the steps of the engine.

    Every coroutine raises `EngineDead` if the engine is dead. A method with the parameter `lora` acts on the open
    requests that use this adapter, or on all open requests if `lora` is None.

    Args:
        execute: executes instructions and wakes the publisher.
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
        # At most the tokens that each request may still generate. None while steps go to the links.
        self._held_steps: list[RequestStep] | None = None
        # The requests of the worker itself, one at a time.
        self._own: dict[str, list[RequestStep]] = {}
        self._num_own = 0
        self._gather_timer: asyncio.TimerHandle | None = None
        self._count_timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Number of requests that are open for their clients or still in the engine."""
        return max(len(self.links.requests), self.runner.num_inside)

    async def stop(self, mode: PauseMode, timeout_s: float, reason: str = "pause") -> None:
        """Accept no more requests, and pause, finish or abort the requests in flight. Any mode may follow any other.

        After `keep`, the engine is paused and all sampled tokens are in the links. After `wait` and `abort`, the engine
        runs and no request is in flight.

        Args:
            reason: reason of the pause in timelines.

        Raises:
            ControlError: `timeout`, with the number of requests in flight. They continue, but no request is accepted.
        """
        self.stop_intake()
        try:
            async with asyncio.timeout(timeout_s):
                if mode == "keep":
                    await self.pause_engine(reason)
                    return
                # Steps may be held since weights were replaced during a pause. Requests that end must deliver them.
                self.release_steps()
                if mode == "abort":
                    self.abort(self.links.requests.names)
                await self.resume_engine()
                await self._until(lambda: not self.count)
        except TimeoutError:
            left = "the engine has not paused" if mode == "keep" else f"{self.count} requests are in flight"
            problem = f"{left} after {timeout_s:.1f} s"
            raise ControlError(ControlCode.TIMEOUT, problem) from None

    def stop_intake(self) -> None:
        """Pull and accept no more requests. Requests that wait in the intake go back to the queue."""
        self._puller.pause()
        self._intake.nak_incoming()

    async def resume(self) -> None:
        """Release the held steps, resume the engine and pull requests again."""
        await self.resume_engine()
        self._puller.resume()

    async def resume_engine(self) -> None:
        """Release the held steps and resume the engine: the requests in flight continue."""
        self.links.requests.resume()
        self.release_steps()
        await self.runner.resume()

    async def pause_engine(self, reason: str = "pause") -> None:
        """Pause the engine. On return all its steps are in the links or held. `reason` is as in `stop`."""
        await self.runner.pause()
        self.flush()
        self.links.requests.hold(reason)

    async def reset_cache(self, *, preempt: bool) -> None:
        """Reset the engine's prefix cache.

        Raises:
            ControlError: `cache_in_use`.
        """
        with self.runner.emptying_cache():
            is_reset = await self.runner.engine.reset_cache(preempt=preempt)
        if not is_reset:
            problem = f"the prefix cache could not be reset: {self.count} requests in flight use it"
            raise ControlError(ControlCode.CACHE_IN_USE, problem)

    def hold_steps(self) -> None:
        """Hold all steps of the engine from now on."""
        if self._held_steps is None:
            self._held_steps = []

    def release_steps(self) -> None:
        """Add the held steps to the links with the current weight version."""
        held, self._held_steps = self._held_steps, None
        if held:
            self.add_steps(held)

    def discard_steps(self) -> None:
        """Discard the held steps. Their requests fail as `worker_fenced`, because tokens are now missing."""
        held, self._held_steps = self._held_steps or [], None
        names = list({step.key for step in held})
        self._execute(self.links.fail(names, _fenced("this worker discarded tokens that came from invalid weights")))

    async def run_alone(self, request: GenerateRequest, timeout_s: float) -> list[RequestStep]:
        """Run a request of the worker itself on the running engine. Its steps never reach a client.

        Cancellation: the request is aborted in the engine.

        Raises:
            ControlError: `timeout`; `engine_error`: the engine rejected the request or failed it.
        """
        self._num_own += 1
        # Names of clients' requests begin with the client, which is never empty. vLLM schedules these names first.
        key = f"/{request.request_id}/{self._num_own}"
        steps = self._own[key] = []
        try:
            async with asyncio.timeout(timeout_s):
                await self.runner.add(key, request)
                await self._until(lambda: bool(steps) and steps[-1].finish_reason is not None)
        except TimeoutError:
            raise ControlError(ControlCode.TIMEOUT, f"{request.request_id} took more than {timeout_s:g} s") from None
        except RequestError as exc:
            raise ControlError(ControlCode.ENGINE_ERROR, f"{request.request_id} was rejected: {exc.message}") from exc
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
        if self._count_timer is None and self.links.dispatcher.experts.is_behind:
            self._count_later()
        self.wake_waiters()

    def _count_later(self) -> None:
        """Count the next rows of long prompts after frames that can be sent, and slowly while frames are in flight."""
        delay_s = COUNT_S if self.links.outbound.held_bytes else 0.0
        self._count_timer = asyncio.get_running_loop().call_later(delay_s, self._count_experts)

    def _count_experts(self) -> None:
        self._count_timer, experts = None, self.links.dispatcher.experts
        experts.count_some()
        if experts.is_behind:
            self._count_later()

    def _end_gathering(self) -> None:
        self._gather_timer = None
        self.flush()

    def flush(self) -> None:
        """Add all batched tokens to the links."""
        self._execute(self.links.flush())

    def _divert_steps(self, steps: list[RequestStep]) -> None:
        """Route steps to the requests of the worker itself. Hold the other steps if steps are being held."""
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
        """Wake the waiting methods: a request may have ended."""
        self._changed.set()

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()

    def abort(self, names: Sequence[str]) -> None:
        """Abort requests by their engine names. Tokens sampled before are delivered."""
        # End the requests here that the engine would end much later, or that wait for a slot outside of it.
        meant = {name for name in names if not self.runner.ends_soon(name)}
        if meant:
            held = self._held_steps or []
            ends = [RequestStep(key=name, token_ids=NO_TOKENS, finish_reason=FinishReason.ABORT) for name in meant]
            steps = [*(step for step in held if step.key in meant), *ends]
            self._execute(self.links.add_steps(steps, time.monotonic()))
            if self._held_steps is not None:
                self._held_steps = [step for step in held if step.key not in meant]
        self._execute(Instructions(abort=list(names)))

    async def abort_and_wait(self, names: Sequence[str]) -> None:
        """Abort requests. On return a running engine no longer has them."""
        self.abort(names)
        if not self.runner.is_engine_paused:
            await self._until(lambda: not self.runner.has_any(names))

    async def abort_all(self, timeout_s: float) -> None:
        """Abort all requests, also if the engine is paused. On return no request is in flight.

        Raises:
            ControlError: `timeout`. The requests have ended for their clients, but the engine still has some of them.
        """
        self.abort(self.links.requests.names)
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self.count)
        except TimeoutError:
            problem = f"the engine still has {self.count} aborted requests after {timeout_s:.1f} s"
            raise ControlError(ControlCode.TIMEOUT, problem) from None

    def fail_for_retry(self, reason: str) -> None:
        """Fail all requests in flight as `worker_fenced`. Other workers resume them."""
        if self.links.requests:
            logger.warning("requests.handed_to_other_workers count=%s reason=%s", len(self.links.requests), reason)
        self.fail_using(None, reason)
        self.release_steps()

    def fail_using(self, lora: str | None, reason: str) -> None:
        """Fail requests as `worker_fenced`, because this worker lost their adapter. Other workers resume them."""
        self._execute(self.links.fail(self.links.requests.names_using(lora), _fenced(reason)))

    def fail_without_adapter(self, reason: str) -> None:
        """Fail the requests that use no adapter as `worker_fenced`. This or another worker resumes them."""
        self._execute(self.links.fail(self.links.requests.names_without_adapter(), _fenced(reason)))

    def fail_awaiting_kv(self, lora: str | None, reason: str) -> None:
        """Fail prefill and decode phases without a token, because KV of different weights must not be mixed."""
        names = self.links.requests.names_awaiting_kv(lora)
        self._execute(self.links.fail(names, RequestError(code=ErrorCode.KV_TRANSFER_FAILED, message=reason)))

    async def restart(self, lora: str | None) -> None:
        """Restart requests without a token in the paused engine, so that only the new weights compute their KV.

        The attempt stays the same: clients have received no chunk of these requests yet.
        """
        names = self.links.requests.restart_unbegun(lora)
        if not names:
            return
        refused = await self.runner.restart(names)
        for request in filter(None, map(self.links.requests.open, set(names).difference(refused))):
            request.timeline.add("restarted", 0)
        for name, error in refused.items():
            self._execute(self.links.fail([name], error))
        logger.info("requests.restarted count=%d refused=%d", len(names), len(refused))


def _fenced(reason: str) -> RequestError:
    return RequestError(code=ErrorCode.WORKER_FENCED, message=reason)
