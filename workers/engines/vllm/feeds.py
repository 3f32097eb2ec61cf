"""The two ways of getting at what vLLM computes; both hand over `StepOutput`s.

`CoreFeed` reads what the engine core reports of each step: faster, and with the routing of each step's tokens.
It relies on vLLM's inner interface, so it is used where a release is found to fit. `GenerateFeed` uses
`AsyncLLM.generate`, vLLM's own front door, which hands out routing at the end of a request only.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from ....schemas.chunk import FinishReason
from ....schemas.errors import EngineDead, InvalidRequest
from ....schemas.request import GenerateRequest
from .kv.params import is_decode_phase
from .kv_history import RECOMPUTED_AT
from .load_meter import LoadMeter
from .loaded import LoadSerials
from .outputs import LogprobTable, StepOutput
from .params import refusal

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine import EngineCoreEvent, EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["CoreFeed", "DrainMarker", "Feed", "RequestMaker"]


class Feed(Protocol):
    """A way into the engine and out of it; used inside `async with`."""

    meter: LoadMeter
    """Has counted what the engine reported so far."""
    rows_with_tokens: bool
    """Routing comes in the step of its tokens; else all of it in a request's last output."""

    async def submit(self, engine_id: str, request: GenerateRequest, params: "VllmSamplingParams") -> None:
        """Hand a request to the engine.

        Raises:
            InvalidRequest: vLLM refuses it; the engine has not seen it.
            EngineDead: the engine is gone.
        """

    async def abort(self, engine_ids: Sequence[str]) -> None:
        """Stop requests: an output with finish reason ABORT follows those that came before, if any is still open."""

    async def next(self) -> list[StepOutput]:
        """What the engine reports next; at best all of one step.

        Raises:
            EngineDead: the engine is gone.
        """

    async def barrier(self) -> None:
        """Return when all that the engine has reported so far was returned by `next`, and `next` was called again.

        It may wait for ever when the engine dies. Only for an engine that reports nothing new meanwhile.
        """

    async def __aenter__(self) -> Self:
        """Start to read."""

    async def __aexit__(self, *_: object) -> None:
        """Stop to read; before the engine is shut down."""


class DrainMarker(asyncio.Event):
    """A marker in the output queue, set by the reader that reaches it: it has read every output before the marker."""


class RequestMaker:
    """Makes vLLM's requests, and so checks them the way vLLM does.

    Args:
        loaded: which weights and adapters they meet.
        supported_tasks: what the engine says that the model can do.
    """

    def __init__(self, llm: "AsyncLLM", loaded: LoadSerials, supported_tasks: Sequence[str]) -> None:
        self._llm = llm
        self._loaded = loaded
        self._supported_tasks = supported_tasks
        self._honours_priority = llm.vllm_config.scheduler_config.policy == "priority"

    def make(self, engine_id: str, request: GenerateRequest, params: "VllmSamplingParams") -> "EngineCoreRequest":
        """Turn a request into the engine core's.

        Raises:
            InvalidRequest: vLLM refuses it.
        """
        from vllm.exceptions import VLLMClientError

        try:
            return self._llm.input_processor.process_inputs(
                engine_id, self.prompt(request, params), params, self._supported_tasks, **self.options(request)
            )
        except InvalidRequest:
            raise
        except (VLLMClientError, ValueError, TypeError) as exc:
            raise refusal(exc, request.sampling) from exc

    def prompt(self, request: GenerateRequest, params: "VllmSamplingParams") -> Any:
        """The prompt as vLLM takes it: token ids, and the salt of its prefix-cache entries."""
        from vllm.inputs.engine import tokens_input

        salt = self._loaded.salt_of(request, takes_kv=is_decode_phase(params))
        return tokens_input(np.asarray(request.prompt_token_ids).tolist(), cache_salt=salt)

    def options(self, request: GenerateRequest) -> dict[str, Any]:
        """What else goes with a request.

        Raises:
            InvalidRequest: it names an adapter that is not loaded.
        """
        adapter = self._loaded.adapter_of(request)
        return {
            "lora_request": None if adapter is None else adapter.lora_request,
            "priority": request.priority if self._honours_priority else 0,
            "trace_headers": _trace_headers(request),
        }


def _trace_headers(request: GenerateRequest) -> dict[str, str] | None:
    """The trace context of a request, as vLLM takes it; None: the request has none."""
    if request.traceparent is None:
        return None
    state = {} if request.tracestate is None else {"tracestate": request.tracestate}
    return {"traceparent": request.traceparent, **state}


class CoreFeed:
    """Reads the engine core's step outputs.

    The queue in between is vLLM's own and has no bound (v1/engine/core_client.py: AsyncMPClient.outputs_queue); what
    it can hold is bounded by the requests that the worker admits and their `max_tokens`.
    """

    rows_with_tokens = True

    def __init__(self, llm: "AsyncLLM", maker: RequestMaker) -> None:
        self._core = llm.engine_core
        self._maker = maker
        self.meter = LoadMeter()

    @staticmethod
    def fits(llm: "AsyncLLM") -> bool:
        """This release has what the feed relies on."""
        from vllm.v1.engine import EngineCoreOutput

        core_has = all(
            hasattr(llm.engine_core, name) for name in ("add_request_async", "abort_requests_async", "outputs_queue")
        )
        fields = {"request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason", "routed_experts"}
        return core_has and fields <= set(EngineCoreOutput.__struct_fields__)

    async def submit(self, engine_id: str, request: GenerateRequest, params: "VllmSamplingParams") -> None:
        """Hand a request to the engine core; see `Feed.submit`."""
        import zmq
        from vllm.v1.engine.exceptions import EngineDeadError

        core_request = self._maker.make(engine_id, request, params)
        try:
            await self._core.add_request_async(core_request)
        except (EngineDeadError, zmq.ZMQError) as exc:
            raise EngineDead(f"the engine took no request: {exc}") from exc

    async def abort(self, engine_ids: Sequence[str]) -> None:
        """Stop requests in the engine core, which says nothing of it; the outputs that do are put in line here."""
        import zmq
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.engine import FinishReason as VllmFinishReason
        from vllm.v1.engine.exceptions import EngineDeadError

        if not engine_ids:
            return
        ends = [EngineCoreOutput(i, [], finish_reason=VllmFinishReason.ABORT) for i in engine_ids]
        self._core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=ends))
        try:
            await self._core.abort_requests_async(list(engine_ids))
        except (EngineDeadError, zmq.ZMQError):
            # `next` is where the death is told.
            return

    async def next(self) -> list[StepOutput]:
        """What one step of the engine core added to all requests."""
        # `get_output_async` is this and a conversion of exceptions, which ends here as well.
        while isinstance(item := await self._core.outputs_queue.get(), DrainMarker):
            item.set()
        if isinstance(item, Exception):
            raise EngineDead(f"the engine core died: {type(item).__name__}: {item}") from item
        self.meter.add(item)
        return [_output(output) for output in item.outputs]

    async def barrier(self) -> None:
        """The engine core's answer to a call comes behind what it has reported before, so all of that is in line."""
        passed = DrainMarker()
        self._core.outputs_queue.put_nowait(passed)
        await passed.wait()

    async def __aenter__(self) -> Self:
        """Nothing to do: vLLM's own task reads from the engine core."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to do: that task ends when the engine is shut down."""


def _output(output: "EngineCoreOutput") -> StepOutput:
    prompt = output.new_prompt_logprobs_tensors
    prefill = output.prefill_stats
    # Since 0.33; beside the finish reason ERROR.
    error = getattr(output, "error", None)
    return StepOutput(
        engine_id=output.request_id,
        token_ids=output.new_token_ids,
        logprobs=None if output.new_logprobs is None else LogprobTable(*output.new_logprobs[:2]),
        prompt_logprobs=None if prompt is None else LogprobTable(prompt[0].numpy(), prompt[1].numpy()),
        routed_experts=output.routed_experts,
        cached_tokens=None if prefill is None else prefill.num_cached_tokens,
        num_external=0 if prefill is None else getattr(prefill, "num_external_cached_tokens", 0),
        was_recomputed=bool(output.events) and _was_recomputed(output.events),
        kv_params=getattr(output, "kv_transfer_params", None),
        finish_reason=None if output.finish_reason is None else FinishReason(str(output.finish_reason)),
        stop_reason=output.stop_reason,
        sampling_mask=getattr(output, "new_sampling_mask", None),
        **({} if error is None else {"error": f"the engine failed this request: {error.message}"}),
    )


def _was_recomputed(events: "Sequence[EngineCoreEvent]") -> bool:
    """True if the engine computed the request's KV anew, as `kv_history` says; vLLM's own events come too early."""
    return any(event.timestamp == RECOMPUTED_AT for event in events)
