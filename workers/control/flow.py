"""What flows through a worker, and how it is held up: requests on their way in, the engine's steps on their way out.

Nothing here decides that the flow should stop; who does has taken the worker out of `serving` before, so that no more
requests come in.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from bus.protocol.step import split
from bus.queue.puller import QueuePuller
from schemas.chunk import FinishReason
from schemas.control import PauseMode
from schemas.errors import ControlCode, ControlError, ErrorCode, RequestError
from schemas.request import GenerateRequest
from workers.engine import RequestStep, TokenBatch
from workers.engine_runner import EngineRunner
from workers.held import Instructions
from workers.intake import Intake
from workers.links import Links

__all__ = ["Flow"]

logger = logging.getLogger(__name__)

NO_TOKENS = np.empty(0, np.int32)
GATHER_S = 0.1
"""How long tokens are gathered whose clients take results whole: a few steps of a large model, and what a worker that
dies costs at most on top."""


class Flow:
    """The requests in a worker's engine, and the steps that it makes of them.

    Args:
        carry_out: does what an event calls for, and has sent what there is to send.
    """

    def __init__(
        self,
        runner: EngineRunner,
        links: Links,
        intake: Intake,
        puller: QueuePuller,
        *,
        carry_out: Callable[[Instructions], None],
    ) -> None:
        self._runner = runner
        self._links = links
        self._intake = intake
        self._puller = puller
        self._carry_out = carry_out
        self._changed = asyncio.Event()
        # Steps kept back, with no more of a request than it may still generate; None while they go on to the links.
        self._kept: list[RequestStep] | None = None
        # The worker's own requests, of which there is one at a time.
        self._own: dict[str, list[RequestStep]] = {}
        self._num_own = 0
        self._gather_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """One line with counts."""
        kept = None if self._kept is None else len(self._kept)
        return f"<Flow in_flight={self.in_flight} frozen={self._runner.is_frozen} kept={kept} own={len(self._own)}>"

    @property
    def in_flight(self) -> int:
        """Requests that are open towards their clients, or that the engine still has."""
        return max(len(self._links), self._runner.num_inside)

    async def stop(self, mode: PauseMode, timeout_s: float) -> None:
        """Take no more, and deal with what is in flight; from any of these to any other.

        Afterwards, by `mode`: `keep`, the engine is frozen, and all that was sampled before is in the links; `wait`,
        the engine runs, and nothing is in flight; `abort`, likewise, as everything was ended with ABORT.

        Raises:
            ControlError: `timeout`, with what is in flight; still nothing is taken, and what runs goes on.
            EngineDead: the engine is gone.
        """
        self.close()
        try:
            async with asyncio.timeout(timeout_s):
                if mode == "keep":
                    await self.freeze()
                    return
                # Held since weights were replaced under a pause: what is to end has to be delivered.
                self.release_steps()
                if mode == "abort":
                    self.abort(self._links.names)
                await self.thaw()
                await self._until(lambda: not self.in_flight)
        except TimeoutError:
            left = "the engine has not stopped" if mode == "keep" else f"{self.in_flight} requests are in flight"
            problem = f"{left} after {timeout_s:.1f} s"
            raise ControlError(ControlCode.TIMEOUT, problem) from None

    def close(self) -> None:
        """Take no more: what is on its way, or waits here, goes back to the queue."""
        self._puller.pause()
        self._intake.give_back()

    async def go(self) -> None:
        """Let the engine run, hand over what was held, and take requests again.

        Raises:
            EngineDead: the engine is gone.
        """
        self.release_steps()
        await self.thaw()
        self._puller.resume()

    async def freeze(self) -> None:
        """Let the engine make no steps; all that it has made is in the links, or kept back.

        Raises:
            EngineDead: the engine is gone.
        """
        await self._runner.pause()
        self.hand_over()

    async def thaw(self) -> None:
        """Let the engine make steps; nothing is taken because of that.

        Raises:
            EngineDead: the engine is gone.
        """
        await self._runner.resume()

    def hold_steps(self) -> None:
        """Keep back what the engine makes from now on."""
        if self._kept is None:
            self._kept = []

    def release_steps(self) -> None:
        """Hand over what was kept back, as if it were made now: it bears the version that holds now."""
        kept, self._kept = self._kept, None
        if kept:
            self.take(kept)

    def discard_steps(self) -> None:
        """Forget what was kept back; the requests that it belonged to end as `worker_fenced`, as they have a hole."""
        kept, self._kept = self._kept or [], None
        names = {step.key for step in kept}
        for name in names:
            self._links.fail(name, _fenced("what this worker made of it was not to be trusted"))
        self._carry_out(Instructions(abort=list(names)))

    async def run_alone(self, request: GenerateRequest, timeout_s: float) -> list[RequestStep]:
        """Have the engine, which is not frozen, run a request of the worker's own; its steps never reach a client.

        Cancellation: the engine is told to abort it.

        Raises:
            ControlError: `timeout`; `engine_error`, the engine refused or failed it.
            EngineDead: the engine is gone.
        """
        self._num_own += 1
        # Clients' names begin with the client, which is never empty.
        key = f"/{request.request_id}/{self._num_own}"
        steps = self._own[key] = []
        try:
            async with asyncio.timeout(timeout_s):
                await self._runner.add(key, request)
                await self._until(lambda: bool(steps) and steps[-1].finish_reason is not None)
        except TimeoutError:
            raise ControlError(ControlCode.TIMEOUT, f"{request.request_id} took more than {timeout_s:g} s") from None
        except RequestError as exc:
            raise ControlError(ControlCode.ENGINE_ERROR, f"{request.request_id} was refused: {exc.message}") from exc
        finally:
            del self._own[key]
            self._runner.abort([key])
        if steps[-1].finish_reason is FinishReason.ERROR:
            raise ControlError(ControlCode.ENGINE_ERROR, f"{request.request_id} failed: {steps[-1].error}")
        return steps

    def take(self, steps: Sequence[RequestStep | TokenBatch]) -> None:
        """Take what the engine made."""
        if self._own or self._kept is not None:
            self._take_apart(split(steps))
        else:
            self._carry_out(self._links.take(steps, time.monotonic()))
            if self._gather_timer is None and self._links.is_gathering:
                self._gather_timer = asyncio.get_running_loop().call_later(GATHER_S, self._end_gathering)
        self.look()

    def _end_gathering(self) -> None:
        self._gather_timer = None
        self.hand_over()

    def hand_over(self) -> None:
        """Let go of what was gathered."""
        self._carry_out(self._links.hand_over())

    def _take_apart(self, steps: list[RequestStep]) -> None:
        """Take them where requests of the worker's own run as well, or where they are kept back."""
        if self._own:
            for step in steps:
                if step.key in self._own:
                    self._own[step.key].append(step)
            steps = [step for step in steps if step.key not in self._own]
        if self._kept is not None:
            self._kept.extend(steps)
        else:
            self._carry_out(self._links.take(steps, time.monotonic()))

    def look(self) -> None:
        """Something may have ended."""
        self._changed.set()

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()

    def abort(self, names: Sequence[str]) -> None:
        """End requests with ABORT, by their engine names; what was made of them is delivered."""
        # The engine would say so with the next step that it makes of them, which may be long in coming.
        meant = {name for name in names if self._runner.is_frozen or self._runner.is_fetching(name)}
        if meant:
            kept = self._kept or []
            ends = [RequestStep(key=name, token_ids=NO_TOKENS, finish_reason=FinishReason.ABORT) for name in meant]
            steps = [*(step for step in kept if step.key in meant), *ends]
            self._carry_out(self._links.take(steps, time.monotonic()))
            if self._kept is not None:
                self._kept = [step for step in kept if step.key not in meant]
        self._carry_out(Instructions(abort=list(names)))

    async def end(self, names: Sequence[str]) -> None:
        """End requests with ABORT; unless it is frozen, the engine has let go of them on return.

        Raises:
            EngineDead: the engine is gone.
        """
        self.abort(names)
        if not self._runner.is_frozen:
            await self._until(lambda: not self._runner.has_any(names))

    async def end_where(self, is_meant: Callable[[str | None], bool]) -> None:
        """End requests, as `end` does, by the adapter that they use.

        Args:
            is_meant: called with the name of each one's adapter, None where it has none.

        Raises:
            EngineDead: the engine is gone.
        """
        await self.end(self._links.using(is_meant))

    async def end_all(self, timeout_s: float) -> None:
        """End everything with ABORT; nothing is in flight on return, also where the engine is frozen.

        Raises:
            ControlError: `timeout`; towards clients all has ended.
            EngineDead: the engine is gone.
        """
        self.abort(self._links.names)
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self.in_flight)
        except TimeoutError:
            problem = f"the engine has not let go of {self.in_flight} aborted requests after {timeout_s:.1f} s"
            raise ControlError(ControlCode.TIMEOUT, problem) from None

    def give_up(self, reason: str) -> None:
        """Let other workers go on with all that is in flight: it ends as `worker_fenced`."""
        if len(self._links):
            logger.warning("flow.given_up requests=%s reason=%s", len(self._links), reason)
        self._carry_out(self._links.fail_all(ErrorCode.WORKER_FENCED, reason))
        self.release_steps()

    def break_legs(self, is_meant: Callable[[str | None], bool], reason: str) -> None:
        """Have legs without a token made anew: KV of one kind of weights must not meet another's.

        Args:
            is_meant: called with the name of each one's adapter, None where it has none.
        """
        names = self._links.handing_over(is_meant)
        for name in names:
            self._links.fail(name, RequestError(code=ErrorCode.KV_TRANSFER_FAILED, message=reason))
        self._carry_out(Instructions(abort=names))

    def give_up_where(self, is_meant: Callable[[str | None], bool], reason: str) -> None:
        """Let other workers go on with requests that use an adapter which this one does not have any more.

        Args:
            is_meant: called with the name of each one's adapter, None where it has none.
        """
        names = self._links.using(is_meant)
        for name in names:
            self._links.fail(name, _fenced(reason))
        self._carry_out(Instructions(abort=names))


def _fenced(reason: str) -> RequestError:
    return RequestError(code=ErrorCode.WORKER_FENCED, message=reason)
