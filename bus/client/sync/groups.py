"""Steps of groups without asyncio: the methods of `GroupSampler`, which block instead of being awaited."""

import asyncio
from collections.abc import AsyncIterable, Generator, Iterable
from enum import Enum
from types import TracebackType
from typing import Final, Self

from ....schemas.checks import describe
from ....schemas.errors import BusClosed, InvalidRequest
from ..group_prompts import Prompt
from ..group_results import GroupStep
from ..group_sampler import GroupSampler
from .owner_thread import OwnerThread

__all__ = ["BlockingGroups", "HandedPrompts"]


class EndOfPrompts(Enum):
    """Marks the end of the prompts."""

    END = "end"


END: Final = EndOfPrompts.END
LEFT: Final = "these groups were closed during a step"


class HandedPrompts:
    """An async iterable whose items another thread provides on demand. Use it from the owner's loop."""

    def __init__(self) -> None:
        self._wanted: asyncio.Future[Prompt | EndOfPrompts] | None = None
        self._woken = asyncio.Event()

    def __repr__(self) -> str:
        """Return one line with the state."""
        return f"<HandedPrompts {'idle' if self._wanted is None else 'wanted'}>"

    def __aiter__(self) -> Self:
        """Return this object, which is its own iterator."""
        return self

    async def __anext__(self) -> Prompt:
        """Wait for the next prompt.

        Raises:
            StopAsyncIteration: no prompts are left.
        """
        self._wanted = asyncio.get_running_loop().create_future()
        self._woken.set()
        try:
            prompt = await self._wanted
        finally:
            self._wanted = None
        if isinstance(prompt, EndOfPrompts):
            raise StopAsyncIteration
        return prompt

    async def until_requested(self, step: asyncio.Future[GroupStep]) -> bool:
        """Wait until the sampler requests a prompt, and return True.

        Return False if the step ended and `wake` was called.
        """
        while not step.done() and (self._wanted is None or self._wanted.done()):
            self._woken.clear()
            await self._woken.wait()
        return not step.done()

    def wake(self) -> None:
        """Make `until_requested` check its condition again."""
        self._woken.set()

    async def bring(self, prompt: "Prompt | EndOfPrompts") -> None:
        """Provide the requested prompt, or the end. This has no effect if the groups were closed meanwhile."""
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(prompt)


class BlockingGroups:
    """Steps of groups, as `GroupSampler` runs them. Create it with `BlockingClient.groups` and enter it with `with`.

    The thread that waits for the step also draws the prompts. Ctrl-C ends a step as a cancellation does: the groups
    keep running, and the next step begins with them. Leaving, also from another thread, ends a running step with
    `BusClosed` and aborts all requests in flight.

    Args:
        owner: thread of the client.
        sampler: draws its prompts from `handed`.
        handed: passes the prompts from this thread to the sampler.
        prompts: the caller's prompts.
        client: stays referenced, because a client without references closes itself.
    """

    def __init__(
        self,
        owner: OwnerThread,
        sampler: GroupSampler,
        handed: HandedPrompts,
        prompts: Iterable[Prompt],
        *,
        client: object,
    ) -> None:
        self._client = client
        self._owner = owner
        self._awaited = sampler
        self._handed = handed
        self._source = iter(check_prompts(prompts))
        # Running steps, by the call that waits for the step. Only the owner's loop uses this. It has more than one step
        # only until the sampler has rejected the others.
        self._steps: dict[object, asyncio.Task[GroupStep]] = {}

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<BlockingGroups {self._awaited!r}>"

    def __enter__(self) -> Self:
        """Allow steps."""
        self._owner.run(self._awaited.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort all requests in flight. Calls of the client after this call run after the abort."""
        self._owner.finish(self._leave())

    def __iter__(self) -> Generator[GroupStep, None, None]:
        """Yield steps until no prompts and no groups are left."""
        while step := self.step():
            yield step

    def step(self, *, version: int | None = None) -> GroupStep:
        """Run groups until enough are complete. Arguments, result and errors are those of `GroupSampler.step`."""
        waiting = object()
        try:
            step = self._owner.run(self._begin(waiting, version))
            while self._owner.run(self._handed.until_requested(step)):
                # An error of the source ends the step, as an interrupt does.
                self._owner.run(self._handed.bring(next(self._source, END)))
            return self._owner.run(_result(step))
        finally:
            # If the step was interrupted, it is still running.
            self._owner.finish(self._cancel(waiting))

    async def _begin(self, waiting: object, version: int | None) -> asyncio.Task[GroupStep]:
        if interrupted := [step for step in self._steps.values() if step.cancelling()]:
            await asyncio.wait(interrupted)
        step = asyncio.get_running_loop().create_task(self._awaited.step(version=version), name="client.step")
        self._steps[waiting] = step
        step.add_done_callback(lambda _: self._on_end(waiting))
        return step

    def _on_end(self, waiting: object) -> None:
        del self._steps[waiting]
        self._handed.wake()

    async def _cancel(self, waiting: object) -> None:
        if waiting in self._steps:
            self._steps[waiting].cancel()

    async def _leave(self) -> None:
        steps = list(self._steps.values())
        for step in steps:
            step.cancel()
        if steps:
            await asyncio.wait(steps)
        await self._awaited.__aexit__(None, None, None)


def check_prompts(prompts: Iterable[Prompt]) -> Iterable[Prompt]:
    """Return `prompts` if it is iterable.

    Raises:
        InvalidRequest: `prompts` is not iterable, or is an async iterable.
    """
    if isinstance(prompts, AsyncIterable):
        allowed = "an iterable; `rollbus.connect` takes async iterables"
        raise InvalidRequest(field="prompts", problem="is an async iterable", allowed=allowed)
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(field="prompts", problem=f"is {describe(prompts)}", allowed="an iterable")
    return prompts


async def _result(step: asyncio.Task[GroupStep]) -> GroupStep:
    await asyncio.wait((step,))
    if step.cancelled():
        raise BusClosed(LEFT)
    return step.result()
