"""Trainer steps over groups of answers that do not wait for their slowest answers.

`rollbus.bus.protocol.groups` decides which groups run, end and stay. This module executes its decisions.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from dataclasses import replace as replace_result
from typing import Any, Final, Generic, Literal, Self, TypeVar

import numpy as np
from msgspec.structs import replace

from ...schemas.checks import describe
from ...schemas.chunk import FinishReason
from ...schemas.errors import BusClosed, InvalidRequest, NoWorkers, RequestError
from ...schemas.request import GenerateRequest, TokenIds, check_continuable, make_id
from ...schemas.sampling import SamplingParams
from ..protocol.groups import GroupPlanner, GroupState
from .calls import Call
from .generation import Generation, Group, GroupStats, GroupStep, join_samples, lengths_of
from .record_writer import RunRecorder
from .runtime import Runtime

T = TypeVar("T")
InexactGroups = Literal["refuse", "continue", "drop"]
"""Handling of a stopped group whose sampler has state. With `refuse`, such prompts are rejected."""
OWN_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})
"""Finish reasons of complete answers."""
STOP_WAIT_S: Final = 2.0
"""Seconds. A worker confirms an abort with its next engine step. A worker that needs longer is slow, frozen or lost, so
the sampler then counts the tokens received so far."""


class Source(Generic[T]):
    """Draws items from the caller's iterable or async iterable, one at a time and only on demand. Use it in one loop.

    Args:
        name: name of the source in errors.
        items: iterable or async iterable of the caller.
        convert: makes an item of the caller's, or raises an error.
        wake: called when an async iterable has returned an item, ended or raised an error.

    Raises:
        InvalidRequest: `items` is not iterable.
    """

    def __init__(self, name: str, items: Any, convert: Callable[[Any], T], wake: Callable[[], None]) -> None:
        if not isinstance(items, Iterable | AsyncIterable):
            raise InvalidRequest(name, f"is {describe(items)}", f"an iterable of {name}")
        self._items: Any = aiter(items) if isinstance(items, AsyncIterable) else iter(items)
        self._is_async = isinstance(items, AsyncIterable)
        self._convert = convert
        self._wake = wake
        # At most one task. It stays until `pop` reads its item: cancelling it would end an async generator.
        self._next: asyncio.Task[Any] | None = None

    @property
    def is_ready(self) -> bool:
        """True if `pop` has an item or the end. If False, the next item is being drawn, and `wake` will be called."""
        if not self._is_async:
            return True
        if self._next is None:
            # Not in a task group: a failure would cancel the caller's task, also while it runs other code.
            self._next = asyncio.get_running_loop().create_task(_anext(self._items), name="client.draw")
            self._next.add_done_callback(lambda _: self._wake())
        return self._next.done()

    def pop(self) -> T | None:
        """Return the next item, or None at the end. Call this only if `is_ready`.

        Raises:
            InvalidRequest: the item is not valid. The next one may be valid.
            Exception: the source raised it.
        """
        try:
            if not self._is_async:
                return self._convert(next(self._items))
            if self._next is None:
                raise RuntimeError("no item is being drawn; check `is_ready` before `pop`")
            drawing, self._next = self._next, None
            return self._convert(drawing.result())
        except (StopIteration, StopAsyncIteration):
            return None

    async def close(self) -> None:
        """Cancel the pending draw and wait until the source has cleaned up."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            if not self._next.cancelled():
                # Retrieve the error: asyncio warns about errors that no code has retrieved.
                self._next.exception()


async def _anext(items: AsyncIterator[Any]) -> Any:
    return await anext(items)


@dataclass(frozen=True, slots=True)
class GroupPrompt:
    """A prompt with a key of the caller."""

    prompt: "GenerateRequest | TokenIds"
    """A request, or token ids that get the sampling parameters of the groups."""
    key: object = None
    """Returned as `Group.key`. The key stays in this process."""


Prompt = GenerateRequest | TokenIds | GroupPrompt
Prompts = Iterable[Prompt] | AsyncIterable[Prompt]


@dataclass(frozen=True, slots=True)
class PromptForm:
    """Builds requests from prompts."""

    n: int
    sampling: SamplingParams
    """Sampling parameters of prompts that are token ids."""
    inexact: InexactGroups

    def request(self, prompt: Prompt) -> tuple[GenerateRequest, object]:
        """Return the request for a group of answers, with a group id, and the key of the prompt.

        Each request gets a new request id, because a data set can repeat a request while the first one runs.

        Raises:
            InvalidRequest: a field is wrong, or the sampler has state and `inexact` is `refuse`.
        """
        key = None
        if isinstance(prompt, GroupPrompt):
            key, prompt = prompt.key, prompt.prompt
        if not isinstance(prompt, GenerateRequest):
            prompt = GenerateRequest(prompt_token_ids=prompt, sampling=self.sampling)
        if prompt.sampling.n not in (1, self.n):
            raise InvalidRequest("sampling.n", f"is {prompt.sampling.n}", f"1, or n={self.n}")
        if self.inexact == "refuse":
            check_continuable(prompt.sampling)
        group_id = prompt.group_id or make_id()
        sampling = replace(prompt.sampling, n=self.n)
        return replace(prompt, request_id=make_id(), group_id=group_id, sampling=sampling), key


class OpenGroup:
    """The answers to one prompt, until a step returns, drops or fails the group.

    Args:
        number: number of the group, unique within its sampler.
        request: request for all samples.
        key: key from the caller's `GroupPrompt`.
        step: number of the step that starts the group.
    """

    def __init__(self, number: int, request: GenerateRequest, key: object, step: int) -> None:
        self.number = number
        self._request = request
        self._key = key
        self._first_step = step
        first = join_samples(request, (), None)
        # One for each sample; the parts of a continued answer are joined.
        self._answers = [replace_result(answer, siblings=()) for answer in (first, *first.siblings)]
        # Indexes of the answers that each call generates.
        self.calls: dict[Call, tuple[int, ...]] = {}
        self._is_begun = False
        self._model = request.model
        self.error: RequestError | None = None
        """Cause of the failure. None if the group has not failed."""

    @property
    def policy(self) -> tuple[str | None, str | None]:
        """Model and adapter that sample the group. The model is None until it is known."""
        return self._model, self._request.lora

    @property
    def is_complete(self) -> bool:
        """True if all answers ended on their own: by a stop token, their length or a repetition."""
        return all(_is_complete(answer) for answer in self._answers)

    @property
    def can_continue_exactly(self) -> bool:
        """True if no open answer has tokens from a sampler with state."""
        has_tokens = any(len(answer.token_ids) for answer in self._answers if not _is_complete(answer))
        return self._request.sampling.is_continuable or not has_tokens

    def rest(self) -> Iterator[tuple[GenerateRequest, tuple[int, ...]]]:
        """Yield requests for the open answers, each with the indexes of its answers.

        If no answer has tokens, yield one request for all answers. Otherwise yield one request for each open answer.

        Raises:
            InvalidRequest: prompt and answer together are too long for a request.
        """
        if not any(len(answer.token_ids) for answer in self._answers):
            # A new id, so that late chunks of an earlier call are not accepted as chunks of this call.
            request_id = make_id() if self._is_begun else self._request.request_id
            yield replace(self._request, request_id=request_id), tuple(range(len(self._answers)))
            return
        for index, answer in enumerate(self._answers):
            if not _is_complete(answer):
                yield self._request.continuing(answer, inexact="continue"), (index,)

    def add(self, call: Call, indexes: tuple[int, ...]) -> None:
        """Record a call in flight for these answers."""
        self.calls[call] = indexes
        self._model = call.model

    def end(self, call: Call) -> None:
        """Join the result of an ended call with its answers."""
        first = call.generation()
        for index, generation in zip(self.calls.pop(call), (first, *first.siblings), strict=True):
            part = replace_result(generation, siblings=())
            self._answers[index] = self._answers[index].joined(part) if self._is_begun else part
        self._is_begun = True
        self.error = self.error or first.error

    def lengths(self, in_flight: dict[str, list[int]]) -> list[int]:
        """Return the number of tokens of each answer.

        Args:
            in_flight: numbers of tokens of the children of open calls, by request id.
        """
        lengths = [len(answer.token_ids) for answer in self._answers]
        for call, indexes in self.calls.items():
            for index, num_tokens in zip(indexes, in_flight.get(call.request.request_id, ()), strict=False):
                lengths[index] += num_tokens
        return lengths

    def result(self, step: int) -> Group:
        """Return the group in its present state, at the end of step `step`."""
        return Group(
            key=self._key,
            request=self._request,
            generations=tuple(self._answers),
            steps=step - self._first_step + 1,
            error=self.error,
        )


def _is_complete(answer: Generation) -> bool:
    return answer.finish_reason in OWN_ENDS


class GroupSampler:
    """Runs steps of groups from prompts. Create it with `Client.groups` and enter it with `async with`.

    Use it from the loop of its client. Leaving aborts all requests in flight.

    Args:
        runtime: runtime of the client.
        prompts: the caller's prompts.
        form: builds the requests from the prompts.
        planner: decides about the groups. No other object may use it.
        recorder: record of these groups. None: the record of the client, if it has one.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompts: Prompts,
        form: PromptForm,
        planner: GroupPlanner,
        recorder: RunRecorder | None,
    ) -> None:
        self._runtime = runtime
        self._form = form
        self._planner = planner
        self._recorder = recorder
        self._woken = asyncio.Event()
        self._prompts = Source("prompts", prompts, form.request, self._woken.set)
        self._numbers = itertools.count()
        self._groups: dict[int, OpenGroup] = {}
        self._group_of: dict[Call, OpenGroup] = {}
        # Bounded by the calls in flight, because each call ends once.
        self._ended: deque[Call] = deque()
        # Of the present step, and of earlier steps that were cancelled.
        self._dropped: list[Group] = []
        self._failed: list[Group] = []
        self._num_started = 0
        self._num_continued = 0
        self._step = 0
        self._is_entered = False
        self._is_stepping = False

    def __repr__(self) -> str:
        """Return one line with counts."""
        stopped = len(self._planner.having(GroupState.STOPPED))
        return f"<GroupSampler step={self._step} calls={len(self._group_of)} stopped={stopped}>"

    async def __aenter__(self) -> Self:
        """Allow steps."""
        self._is_entered = True
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Abort all requests in flight."""
        self._is_entered = False
        for call in self._group_of:
            self._runtime.remove(call)
        self._group_of.clear()
        self._groups.clear()
        await self._prompts.close()

    async def __aiter__(self) -> AsyncIterator[GroupStep]:
        """Yield steps until no prompts and no groups are left."""
        while step := await self.step():
            yield step

    async def step(self, *, version: int | None = None) -> GroupStep:
        """Run groups until enough are complete, stop the others, and return without waiting until they have stopped.

        The step first continues the groups that the previous step stopped, from their tokens. If no prompts are left,
        the step returns the remaining groups. If no groups are left either, the returned step is false.

        Args:
            version: version of the trainer's weights; `max_lag` counts from it. None: the newest version that a live
                worker has.

        Cancellation: the groups keep running, and the next step begins with them. Nothing is lost.

        Raises:
            NoWorkers: no worker serves the model. The next step continues the groups.
            InvalidRequest: a prompt is not valid. The next step continues after this prompt.
            BusClosed: the sampler is not open.
            RuntimeError: another step is running.
            Exception: the iterable of the prompts raised it.
        """
        if not self._is_entered:
            raise BusClosed("these groups are not open; call `step` inside `async with`")
        self._runtime.thread.check_usable()
        if self._is_stepping:
            raise RuntimeError("a step of these groups is still running; wait for it before the next step")
        self._is_stepping = True
        try:
            return await self._run_step(version, time.monotonic())
        finally:
            self._is_stepping = False

    async def _run_step(self, version: int | None, begun_at: float) -> GroupStep:
        recorder = self._recorder or self._runtime.recorder
        if recorder is not None:
            await recorder.wait_for_room()
        paused_s = await self._runtime.thread.call(self._runtime.pauses.paused_s)
        await self._settle()
        start = self._planner.begin_step(self._lags(version))
        for number in start.dropped:
            self._dropped.append(self._groups.pop(number).result(self._step))
        self._step += 1
        for number in start.continued:
            await self._continue(self._groups[number])
        while True:
            self._woken.clear()
            await self._collect()
            if self._planner.is_over:
                break
            if self._planner.num_to_start and self._prompts.is_ready:
                await self._start_next()
            else:
                await self._woken.wait()
        step = await self._end_step(version, begun_at, paused_s)
        # The results are in memory: the next step waits if the record has no room.
        if recorder is not None:
            self._record(recorder, step)
        return step

    async def _end_step(self, version: int | None, begun_at: float, paused_s: dict[str, float]) -> GroupStep:
        stopping = self._planner.stop()
        in_flight = await self._runtime.stop(self._ids(stopping))
        now_paused_s = await self._runtime.thread.call(self._runtime.pauses.paused_s)
        # Groups that completed at the same moment are included.
        await self._collect()
        # No await follows, so a cancellation cannot lose the groups that are returned.
        num_complete = len(self._planner.having(GroupState.COMPLETE))
        taken = [self._groups.pop(number).result(self._step) for number in self._planner.pop_step()]
        policies = {(generation.model, generation.lora) for group in taken for generation in group.generations}
        newest = [found for policy in policies if (found := self._newest(*policy)) is not None]
        pauses = [now_paused_s.get(model, 0.0) - paused_s.get(model, 0.0) for model, _ in policies if model]
        carried = [length for group in self._groups.values() for length in group.lengths(in_flight)]
        stats = GroupStats(
            taken=lengths_of(taken),
            carried=np.array(carried, "i4"),
            dropped=lengths_of(self._dropped),
            seconds=time.monotonic() - begun_at,
            started=self._num_started,
            continued=self._num_continued,
            carried_complete=num_complete - len(taken),
            version=version if version is not None else max(newest, default=None),
            paused_s=max(pauses, default=0.0),
        )
        step = GroupStep(groups=tuple(taken), dropped=tuple(self._dropped), failed=tuple(self._failed), stats=stats)
        self._dropped, self._failed, self._num_started, self._num_continued = [], [], 0, 0
        return step

    async def _settle(self) -> None:
        """Wait until the groups that the previous step stopped have ended, for at most `STOP_WAIT_S`."""
        deadline: float | None = asyncio.get_running_loop().time() + STOP_WAIT_S
        while True:
            self._woken.clear()
            await self._collect()
            stopping = self._planner.having(GroupState.STOPPING)
            if not stopping:
                return
            try:
                async with asyncio.timeout_at(deadline):
                    await self._woken.wait()
            except TimeoutError:
                deadline = None
                # Abort them: they end now with the tokens received so far.
                await self._runtime.abort(self._ids(stopping))

    def _ids(self, numbers: tuple[int, ...]) -> list[str]:
        return [call.request.request_id for number in numbers for call in self._groups[number].calls]

    def _record(self, recorder: RunRecorder, step: GroupStep) -> None:
        for outcome, groups in (("taken", step.groups), ("dropped", step.dropped), ("failed", step.failed)):
            for group in groups:
                columns = {"outcome": outcome, "step": self._step}
                if isinstance(group.key, (int, str)):
                    columns["group_key"] = str(group.key)
                for generation in group.generations:
                    newest = self._newest(generation.model, generation.lora)
                    recorder.add(generation, newest_version=newest, group=columns)

    def _newest(self, model: str | None, lora: str | None) -> int | None:
        return self._runtime.watcher.snapshot.newest_version(model, lora)

    def _lags(self, version: int | None) -> dict[int, int]:
        """Return by how many versions the oldest token of each group is behind."""
        if self._planner.max_lag is None:
            return {}
        lags = {}
        newest: dict[tuple[str | None, str | None], int | None] = {}
        for number, group in self._groups.items():
            oldest = group.result(self._step).oldest_version
            if oldest is None:
                continue
            if group.policy not in newest:
                newest[group.policy] = version if version is not None else self._newest(*group.policy)
            now = newest[group.policy]
            lags[number] = 0 if now is None else now - oldest
        return lags

    async def _start_next(self) -> None:
        prompt = self._prompts.pop()
        if prompt is None:
            self._planner.end_prompts()
            return
        request, key = prompt
        group = OpenGroup(next(self._numbers), request, key, self._step)
        self._groups[group.number] = group
        self._planner.start(group.number)
        self._num_started += 1
        await self._send(group)

    async def _continue(self, group: OpenGroup) -> None:
        """Request the rest of a stopped group, or drop the group."""
        if self._form.inexact == "drop" and not group.can_continue_exactly:
            self._planner.drop(group.number)
            self._dropped.append(self._groups.pop(group.number).result(self._step))
            return
        self._planner.resume(group.number)
        self._num_continued += 1
        await self._send(group)

    async def _send(self, group: OpenGroup) -> None:
        """Open a call for each request of a group. If one call cannot be opened, close the others."""
        is_sent = False
        try:
            for request, indexes in group.rest():
                call = await self._runtime.open(request, streams=False)
                group.add(call, indexes)
                self._group_of[call] = group
                call.when_ended(self._on_end)
            is_sent = True
        except NoWorkers:
            raise
        except RequestError as exc:
            group.error = exc
        finally:
            if not is_sent:
                self._forget_calls(group)
                if group.error is not None:
                    self._fail(group)
                else:
                    # The next step continues the group.
                    self._planner.interrupt(group.number)

    def _on_end(self, call: Call) -> None:
        self._ended.append(call)
        self._woken.set()

    async def _collect(self) -> None:
        """Process the results of ended calls, and complete, continue or fail their groups."""
        while self._ended:
            call = self._ended.popleft()
            group = self._group_of.pop(call, None)
            if group is None:
                continue
            group.end(call)
            self._runtime.remove(call)
            if group.error is not None:
                self._forget_calls(group)
                self._fail(group)
            elif not group.calls and group.is_complete:
                self._planner.complete(group.number)
            elif not group.calls and self._planner.interrupt(group.number):
                await self._continue(group)

    def _forget_calls(self, group: OpenGroup) -> None:
        """Abort the calls of a group."""
        for call in group.calls:
            del self._group_of[call]
            self._runtime.remove(call)
        group.calls.clear()

    def _fail(self, group: OpenGroup) -> None:
        self._planner.fail(group.number)
        self._failed.append(self._groups.pop(group.number).result(self._step))
