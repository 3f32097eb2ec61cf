"""The way through `AsyncLLM.generate`, for releases whose engine core cannot be read; see `feeds`."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from schemas.chunk import FinishReason
from schemas.errors import EngineDead
from schemas.request import GenerateRequest
from workers.engines.vllm.feeds import RequestMaker
from workers.engines.vllm.outputs import LogprobTable, Output

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["GenerateFeed"]

MAX_WAITING = 1024
"""Outputs that wait to be read: a few steps of a full batch. Beyond it the readers of `generate` wait, and vLLM
replaces what they have not taken by what comes after it."""


class GenerateFeed:
    """One task per request iterates over `AsyncLLM.generate`.

    Outputs are cumulative: when a reader is late, vLLM replaces an output by the next one, and nothing is lost. With
    deltas it merges the two, and 0.30 then loses the routing of the last one (outputs.py: RequestOutput.add).
    """

    rows_with_tokens = False

    def __init__(self, llm: "AsyncLLM", maker: RequestMaker) -> None:
        self._llm = llm
        self._maker = maker
        self._queue: asyncio.Queue[Output | EngineDead] = asyncio.Queue(MAX_WAITING)
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches_engine = False

    async def __aenter__(self) -> Self:
        """Open the group that owns the readers."""
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the readers."""
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)
        if self._queue.empty():
            # Someone may wait for outputs that will not come.
            self._queue.put_nowait(EngineDead("the engine is closed"))

    async def submit(self, engine_id: str, request: GenerateRequest, params: "VllmSamplingParams") -> None:
        """Hand a request to `AsyncLLM`; see `Feed.submit`."""
        from vllm.sampling_params import RequestOutputKind

        if self._llm.errored:
            raise EngineDead("the engine took no request: it is dead")
        # Only for its checks: `generate` makes its own when its first output is asked for, too late to refuse.
        self._maker.make(engine_id, request, params.clone())
        params.output_kind = RequestOutputKind.CUMULATIVE
        params.flat_logprobs = True
        stream = self._llm.generate(self._maker.prompt(request), params, engine_id, **self._maker.options(request))
        self._run(self._read(engine_id, stream), f"generate-{engine_id}")

    async def abort(self, engine_ids: Sequence[str]) -> None:
        """Stop requests; vLLM reports their end itself, with the routing so far."""
        if engine_ids and not self._llm.errored:
            await self._llm.abort(list(engine_ids))

    async def next(self) -> list[Output]:
        """All that waits; at least one output."""
        outputs: list[Output] = []
        item = await self._queue.get()
        while True:
            if isinstance(item, EngineDead):
                raise item
            outputs.append(item)
            if self._queue.empty():
                return outputs
            item = self._queue.get_nowait()

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, output_handler: "asyncio.Task[None]") -> None:
        """Tell the engine's death also when no request is there to hear of it."""
        await asyncio.wait({output_handler})
        await self._queue.put(EngineDead("the engine died"))

    async def _read(self, engine_id: str, stream: "AsyncIterator[RequestOutput]") -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        cursor = _Cursor(engine_id)
        try:
            async for request_output in stream:
                if not self._watches_engine and self._llm.output_handler is not None:
                    self._watches_engine = True
                    self._run(self._watch(self._llm.output_handler), "generate-watch")
                await self._queue.put(cursor.advance(request_output))
        except EngineDeadError as exc:
            await self._queue.put(EngineDead(f"the engine died: {exc}"))
        except (EngineGenerateError, VLLMClientError) as exc:
            cause = exc.__cause__ or exc
            error = f"the engine failed this request: {type(cause).__name__}: {cause}"
            await self._queue.put(Output(engine_id=engine_id, finish_reason=FinishReason.ERROR, error=error))


class _Cursor:
    """How far a cumulative output has been read."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._num_tokens = 0

    def advance(self, request_output: "RequestOutput") -> Output:
        """What `request_output` has beyond the one before it."""
        completion = request_output.outputs[0]
        first, past = self._num_tokens, len(completion.token_ids)
        self._num_tokens = past
        return Output(
            engine_id=self._engine_id,
            token_ids=list(completion.token_ids[first:past]),
            logprobs=_table(completion.logprobs, first, past),
            prompt_logprobs=None
            if first or request_output.prompt_logprobs is None
            # The first entry stands for the first prompt token, which has none.
            else _table(request_output.prompt_logprobs, 1, len(request_output.prompt_logprobs)),
            routed_experts=completion.routed_experts,
            cached_tokens=request_output.num_cached_tokens,
            finish_reason=None if completion.finish_reason is None else FinishReason(completion.finish_reason),
            stop_reason=completion.stop_reason,
        )


def _table(flat: Any, first: int, past: int) -> LogprobTable | None:
    """Positions [first, past) of vLLM's `FlatLogprobs`; each has as many entries as the others."""
    if flat is None or past <= first:
        return None
    low, high = flat.start_indices[first], flat.end_indices[past - 1]
    return LogprobTable(
        np.array(flat.token_ids[low:high], np.int32).reshape(past - first, -1),
        np.array(flat.logprobs[low:high], np.float32).reshape(past - first, -1),
    )
