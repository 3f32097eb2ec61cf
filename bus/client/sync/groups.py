"""Steps of groups without asyncio: the names of `GroupSampler`, which block where those are awaited."""

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
    """There are no more prompts."""

    END = "end"


END: Final = EndOfPrompts.END
LEFT: Final = "these groups were left in the midst of a step"


class HandedPrompts:
    """An async iterable whose prompts another thread brings, each when it is wanted. Use it from the owner's loop."""

    def __init__(self) -> None:
        self._wanted: asyncio.Future[Prompt | EndOfPrompts] | None = None
        self._woken = asyncio.Event()

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<HandedPrompts {'idle' if self._wanted is None else 'wanted'}>"

    def __aiter__(self) -> Self:
        """It is its own iterator."""
        return self

    async def __anext__(self) -> Prompt:
        """Wait for the next prompt.

        Raises:
            StopAsyncIteration: there are no more.
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

    async def is_wanted(self, step: asyncio.Future[GroupStep]) -> bool:
        """Wait until a prompt is wanted; False: the step is over, and `wake` was called."""
        while not step.done() and (self._wanted is None or self._wanted.done()):
            self._woken.clear()
            await self._woken.wait()
        return not step.done()

    def wake(self) -> None:
        """Have `is_wanted` look again."""
        self._woken.set()

    async def bring(self, prompt: "Prompt | EndOfPrompts") -> None:
        """Hand over the prompt that is wanted, or the end. Without effect where its groups were left meanwhile."""
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(prompt)


class BlockingGroups:
    """Steps of groups, as `GroupSampler` takes them; made by `BlockingClient.groups`, to be entered with `with`.

    Prompts are drawn on the thread that waits for the step. Ctrl-C ends a step as cancelling does: what runs goes on to
    run, and the next step begins with it. Leaving, also from another thread, ends a step that is under way with
    `BusClosed`, and aborts what is in flight.

    Args:
        owner: of the client.
        sampler: takes its prompts from `handed`.
        handed: what is drawn here.
        prompts: the caller's.
    """

    def __init__(
        self, owner: OwnerThread, sampler: GroupSampler, handed: HandedPrompts, prompts: Iterable[Prompt]
    ) -> None:
        self._owner = owner
        self._awaited = sampler
        self._handed = handed
        self._source = iter(check_prompts(prompts))
        # Of the owner's loop: each step that is not over, by the call that waits for it. More than one only until the
        # sampler has refused the others.
        self._steps: dict[object, asyncio.Task[GroupStep]] = {}

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<BlockingGroups {self._awaited!r}>"

    def __enter__(self) -> Self:
        """Allow steps."""
        self._owner.run(self._awaited.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is in flight, before all that the client is asked for later."""
        self._owner.finish(self._leave())

    def __iter__(self) -> Generator[GroupStep, None, None]:
        """Yield steps until there are no more prompts and no groups."""
        while step := self.step():
            yield step

    def step(self, *, version: int | None = None) -> GroupStep:
        """Run groups until enough are complete, as `GroupSampler.step` does, with its arguments and errors."""
        waiting = object()
        try:
            step = self._owner.run(self._begin(waiting, version))
            while self._owner.run(self._handed.is_wanted(step)):
                # What this raises ends the step, as an interrupt does.
                self._owner.run(self._handed.bring(next(self._source, END)))
            return self._owner.run(_result(step))
        finally:
            # A step that was interrupted is not over.
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
    """Return what prompts can be drawn from.

    Raises:
        InvalidRequest: it is something else.
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
