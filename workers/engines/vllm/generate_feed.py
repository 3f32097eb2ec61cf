"""Reads outputs as `AsyncLLM.generate` does, for releases whose engine core cannot be read; see `feeds`."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ....schemas.chunk import FinishReason
from ....schemas.errors import EngineDead, ForeignError, foreign_code
from ....schemas.request import GenerateRequest
from .feed import DrainMarker, LoadMeter, RequestMaker
from .outputs import LogprobTable, StepOutput
from .params import refusal

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector


MAX_WAITING = 1024
"""Maximum number of outputs in the queue: a few steps of a full batch. If the queue is full, the readers wait, and vLLM
replaces each output that they have not read by the next output."""


class GenerateFeed:
    """Reads the outputs that `AsyncLLM` collects for each request, with one task per request.

    Outputs are cumulative. If a reader is late, vLLM replaces an output by the next output, which loses no data. With
    deltas, vLLM merges both outputs, and vLLM 0.30 then loses the routed experts of the last output (outputs.py:
    RequestOutput.add).
    """

    rows_with_tokens = False

    def __init__(self, llm: "AsyncLLM", maker: RequestMaker) -> None:
        self._llm = llm
        self._maker = maker
        self.meter = LoadMeter()
        self._queue: asyncio.Queue[StepOutput | EngineDead | DrainMarker] = asyncio.Queue(MAX_WAITING)
        self._held: DrainMarker | None = None
        """The marker that followed the outputs which `next` returned last."""
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers: set[_Reader] = set()
        self._moved = asyncio.Event()
        """Set when a reader has put an output into the queue, or has ended."""
        self._watches_engine = False

    async def __aenter__(self) -> Self:
        """Open the task group of the readers, and intercept the outputs between the engine core and vLLM's own task."""
        await self._group.__aenter__()
        self._get_output = self._llm.engine_core.get_output_async
        self._llm.engine_core.get_output_async = self._get_next_output
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the readers, and restore vLLM's own method."""
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)
        del self._llm.engine_core.get_output_async
        if self._queue.empty():
            # A caller of `next` may wait for outputs that never arrive.
            self._queue.put_nowait(EngineDead("the engine is closed"))

    async def submit(self, engine_id: str, request: GenerateRequest, params: "VllmSamplingParams") -> None:
        """Submit a request to `AsyncLLM`; see `Feed.submit`."""
        import zmq
        from vllm.exceptions import GracefulHTTPError, VLLMClientError
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        params.output_kind = RequestOutputKind.CUMULATIVE
        params.flat_logprobs = True
        prompt, options = self._maker.prompt(request, params), self._maker.options(request)
        try:
            collector = await self._llm.add_request(engine_id, prompt, params, **options)
        except (EngineDeadError, zmq.ZMQError) as exc:
            raise EngineDead(f"the engine did not accept the request: {exc}") from exc
        except (VLLMClientError, GracefulHTTPError, ValueError, TypeError) as exc:
            raise refusal(exc, request.sampling) from exc
        if not self._watches_engine:
            self._watches_engine = True
            self._run(self._watch(self._llm.output_handler), "generate-watch")
        reader = _Reader(engine_id, collector)
        self._readers.add(reader)
        self._run(self._read(reader), f"generate-{engine_id}")

    async def abort(self, engine_ids: Sequence[str]) -> None:
        """Abort requests; vLLM itself reports their end, with the routed experts so far."""
        if engine_ids and not self._llm.errored:
            await self._llm.abort(list(engine_ids))

    async def next(self) -> list[StepOutput]:
        """Return all outputs in the queue, at least one; see `Feed.next`."""
        if self._held is not None:
            self._held.set()
            self._held = None
        outputs: list[StepOutput] = []
        while not outputs or not self._queue.empty():
            item = await self._queue.get()
            if isinstance(item, EngineDead):
                raise item
            if isinstance(item, StepOutput):
                outputs.append(item)
            elif outputs:
                self._held = item
                break
            else:
                item.set()
        return outputs

    async def barrier(self) -> None:
        """Wait until vLLM's task, then the readers and then `next` have processed all reported outputs; see `Feed`."""
        if self._llm.output_handler is not None:
            handled = DrainMarker()
            self._llm.engine_core.outputs_queue.put_nowait(handled)
            await handled.wait()
        while any(reader.has_more for reader in self._readers):
            self._moved.clear()
            await self._moved.wait()
        read = DrainMarker()
        await self._queue.put(read)
        await read.wait()

    async def _get_next_output(self) -> Any:
        """Return the next output to vLLM's task, which calls this when it has processed all earlier outputs."""
        while isinstance(item := await self._get_output(), DrainMarker):
            item.set()
        self.meter.add(item)
        return item

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, output_handler: "asyncio.Task[None]") -> None:
        """Report the engine's death; without this, `next` would not learn of it while no request is open."""
        await asyncio.wait({output_handler})
        await self._queue.put(EngineDead("the engine died"))

    async def _read(self, reader: "_Reader") -> None:
        try:
            while not reader.is_finished:
                await self._queue.put(await reader.next())
                reader.is_handing_on = False
                self._moved.set()
        except EngineDead as exc:
            await self._queue.put(exc)
        finally:
            self._readers.discard(reader)
            self._moved.set()


class _Reader:
    """Reads the outputs of one request from vLLM's collector."""

    def __init__(self, engine_id: str, collector: "RequestOutputCollector") -> None:
        self.engine_id = engine_id
        self.is_finished = False
        self.is_handing_on = False
        """True if the reader has read an output that is not in the feed's queue yet."""
        self._collector = collector
        self._num_tokens = 0

    @property
    def has_more(self) -> bool:
        """True if an output of the engine has not passed this reader yet."""
        return self.is_handing_on or self._collector.output is not None

    async def next(self) -> StepOutput:
        """Return the next output.

        Raises:
            EngineDead: vLLM's own task failed for any reason, so no more outputs arrive.
        """
        try:
            with foreign_code():
                request_output = self._collector.get_nowait() or await self._collector.get()
        except ForeignError as exc:
            raise EngineDead(f"the engine died: {exc}") from exc
        self.is_handing_on = True
        self.is_finished = request_output.finished
        return self._advance(request_output)

    def _advance(self, request_output: "RequestOutput") -> StepOutput:
        """Return the part of a cumulative output that the previous output did not have."""
        completion = request_output.outputs[0]
        first, past = self._num_tokens, len(completion.token_ids)
        self._num_tokens = past
        return StepOutput(
            engine_id=self.engine_id,
            token_ids=list(completion.token_ids[first:past]),
            logprobs=_table(completion.logprobs, first, past),
            prompt_logprobs=None
            if first or request_output.prompt_logprobs is None
            # Skip the first entry: the first prompt token has no log probability.
            else _table(request_output.prompt_logprobs, 1, len(request_output.prompt_logprobs)),
            routed_experts=completion.routed_experts,
            cached_tokens=request_output.num_cached_tokens,
            kv_params=getattr(request_output, "kv_transfer_params", None),
            finish_reason=None if completion.finish_reason is None else FinishReason(completion.finish_reason),
            stop_reason=completion.stop_reason,
        )


def _table(flat: Any, first: int, past: int) -> LogprobTable | None:
    """Return the positions [first, past) of vLLM's `FlatLogprobs`; all positions have the same number of entries."""
    if flat is None or past <= first:
        return None
    low, high = flat.start_indices[first], flat.end_indices[past - 1]
    return LogprobTable(
        np.array(flat.token_ids[low:high], np.int32).reshape(past - first, -1),
        np.array(flat.logprobs[low:high], np.float32).reshape(past - first, -1),
    )
