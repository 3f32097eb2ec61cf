"""Requests with the complete output of an engine, split into steps, and the expected result at the client."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.bus.protocol.stream.result_arrays import TokenMasks
from rollbus.schemas.chunk import Chunk, FinishReason, PromptLogprobs, SamplingMask, TopLogprobs
from rollbus.schemas.messages import RequestKey
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import DTYPES, Rows, dtype_for
from rollbus.schemas.sampling import SamplingParams

VERSION = 7
"""The first weight version of every scenario."""


@dataclass(frozen=True)
class Scenario:
    """A request, the shape of its model's routed experts, and the steps of the engine that serves it."""

    request: GenerateRequest
    routing: RoutedExpertsInfo | None
    steps: list[RequestStep]
    versions: list[int]
    """The weight version of each step."""
    arrays: dict[str, npt.NDArray[Any] | None]
    """The arrays of the complete result, by their names in `Generation`."""
    masks: list[list[int]] | None = None
    """The sampling mask of each token; None if the engine makes no masks."""
    lora_versions: list[int] | None = None
    """The adapter version of each step; None if the request uses no adapter."""

    def writer(self, segment_bytes: int = 2**20, key: RequestKey | None = None) -> ChunkWriter:
        """Return a chunk writer like that of a worker."""
        return ChunkWriter(
            RequestKey("r") if key is None else key,
            prompt_len=self.request.prompt_len,
            routing=self.routing,
            start=self.request.routed_experts_prompt_start,
            segment_bytes=segment_bytes,
        )

    def stream(self) -> ResponseStream:
        """Return a response stream like that of a client in `complete`."""
        return ResponseStream(self.request, child=0, attempt=0, keep=True)

    def chunks(self, segment_bytes: int = 2**20, gather: int = 1) -> list[Chunk]:
        """Return all chunks; the writer adds `gather` steps before it writes chunks."""
        writer = self.writer(segment_bytes)
        chunks: list[Chunk] = []
        lora_versions: Sequence[int | None] = self.lora_versions or [None] * len(self.steps)
        for index, (step, version, lora) in enumerate(zip(self.steps, self.versions, lora_versions, strict=True), 1):
            writer.append_step(step, version, lora)
            if index % gather == 0 or index == len(self.steps):
                chunks += drain(writer)
        return chunks


def drain(writer: ChunkWriter) -> list[Chunk]:
    """Return all unsent chunks."""
    chunks: list[Chunk] = []
    while (chunk := writer.next_chunk()) is not None:
        chunks.append(chunk)
    return chunks


def assert_complete(scenario: Scenario, chunks: Sequence[Chunk]) -> None:
    """Assert that the chunks are valid, have no gap in their numbers, and hold exactly the complete result."""
    stream = scenario.stream()
    delivered = [chunk for part in chunks for chunk in stream.add(part)]

    assert [chunk.chunk_index for chunk in delivered] == list(range(len(delivered)))
    assert [chunk.is_terminal for chunk in delivered] == [False] * (len(delivered) - 1) + [True]
    assert stream.end.finish_reason is scenario.steps[-1].finish_reason
    got = stream.arrays()
    for name, expected in scenario.arrays.items():
        if expected is None:
            assert got.get(name) is None
        else:
            assert got[name].dtype == expected.dtype
            np.testing.assert_array_equal(got[name], expected, err_msg=name)
    masks: TokenMasks | None = got.get("sampling_mask")
    assert (None if masks is None else [ids.tolist() for ids in masks.split()]) == scenario.masks


def make_scenario(
    rng: np.random.Generator,
    *,
    prompt_len: int,
    cuts: Sequence[int],
    start: int = 0,
    routing: RoutedExpertsInfo | None = None,
    widths: tuple[int | None, int | None] = (0, None),
) -> Scenario:
    """Make a random result of `cuts[-1]` tokens, in which step i ends before token `cuts[i]`.

    Args:
        widths: `sampling.logprobs` and `sampling.prompt_logprobs`.
    """
    num_tokens = cuts[-1]
    request = GenerateRequest(
        prompt_token_ids=[1] * prompt_len,
        sampling=SamplingParams(max_tokens=num_tokens, logprobs=widths[0], prompt_logprobs=widths[1]),
        routed_experts_prompt_start=start,
        return_routed_experts=None if routing is None else True,
    )
    rows: Rows | None = None
    if routing is not None:
        shape = (prompt_len - start + num_tokens - 1, routing.num_layers, routing.top_k)
        rows = rng.integers(0, routing.num_experts, shape).astype(DTYPES[routing.dtype])
    versions = VERSION + np.cumsum(rng.random(len(cuts)) < 0.2)
    arrays: dict[str, npt.NDArray[Any] | None] = {
        "token_ids": rng.integers(0, 1000, num_tokens).astype(np.int32),
        "weight_versions": np.repeat(versions, np.diff([0, *cuts])).astype(np.int32),
        "lora_versions": None,
        "routed_experts": rows,
    }
    arrays |= _logprobs(rng, "", num_tokens, widths[0]) | _logprobs(rng, "prompt_", prompt_len - 1, widths[1])
    steps = list(_steps(arrays, cuts, start))
    return Scenario(request, routing, steps, versions.tolist(), arrays)


def _logprobs(rng: np.random.Generator, prefix: str, count: int, width: int | None) -> dict[str, Any]:
    shape = count, width or 0
    return {
        f"{prefix}logprobs": None if width is None else -rng.random(count).astype(np.float32),
        f"{prefix}top_token_ids": rng.integers(0, 1000, shape).astype(np.int32) if width else None,
        f"{prefix}top_logprobs": -rng.random(shape).astype(np.float32) if width else None,
    }


def _steps(arrays: dict[str, Any], cuts: Sequence[int], start: int) -> Iterator[RequestStep]:
    """Split a result into steps as an engine does: each step has the rows that it computed."""
    rows, logprobs = arrays["routed_experts"], arrays["logprobs"]
    prompt_rows = 0 if rows is None else len(rows) - (cuts[-1] - 1)
    begin = 0
    for index, end in enumerate(cuts):
        first_row = 0 if index == 0 else prompt_rows + begin - 1
        last_row = prompt_rows + end - 1
        prompt = None
        if index == 0 and arrays["prompt_logprobs"] is not None:
            top = _top(arrays["prompt_top_token_ids"], arrays["prompt_top_logprobs"])
            prompt = PromptLogprobs(1, arrays["prompt_logprobs"].tobytes(), top)
        yield RequestStep(
            key="k",
            token_ids=arrays["token_ids"][begin:end],
            logprobs=None if logprobs is None else logprobs[begin:end],
            top_logprobs=None
            if arrays["top_token_ids"] is None
            else _top(arrays["top_token_ids"][begin:end], arrays["top_logprobs"][begin:end]),
            prompt_logprobs=prompt,
            routed_experts=None if rows is None else rows[first_row:last_row],
            routed_experts_start=start + first_row,
            cached_tokens=3 if index == 0 else None,
            finish_reason=FinishReason.LENGTH if end == cuts[-1] else None,
        )
        begin = end


def _top(ids: npt.NDArray[Any] | None, logprobs: npt.NDArray[Any] | None) -> TopLogprobs | None:
    if ids is None or logprobs is None:
        return None
    return TopLogprobs(ids.shape[1], ids.tobytes(), logprobs.tobytes())


def _hand_rows_late(scenario: Scenario, by: int) -> None:
    """Delay the rows of each step by `by` steps; the last step has all remaining rows."""
    steps, routing = scenario.steps, scenario.routing
    rows = scenario.arrays["routed_experts"]
    if rows is None or routing is None:
        return
    start = scenario.request.routed_experts_prompt_start
    counts = [0 if step.routed_experts is None else len(step.routed_experts) for step in steps]
    sent = 0
    for index, step in enumerate(steps):
        due = sum(counts) if index == len(steps) - 1 else sum(counts[: max(index + 1 - by, 0)])
        step.routed_experts = rows[sent:due]
        step.routed_experts_start = start + sent
        sent = due


def with_masks(scenario: Scenario, masks: list[list[int]]) -> Scenario:
    """Return the scenario with these sampling masks, one for each token."""
    at = 0
    for step in scenario.steps:
        own = masks[at : at + len(step.token_ids)]
        at += len(own)
        counts, ids = [len(each) for each in own], [token_id for each in own for token_id in each]
        step.sampling_mask = SamplingMask(np.array(counts, "<i4").tobytes(), np.array(ids, "<i4").tobytes())
    return replace(scenario, masks=masks)


@st.composite
def scenarios(draw: st.DrawFn, *, uses_lora: bool = False) -> Scenario:
    """Draw a scenario with any prompt, start, result, routed experts, logprobs and steps.

    With `uses_lora` the request uses an adapter whose version changes between steps.
    """
    prompt_len = draw(st.integers(1, 30))
    num_tokens = draw(st.integers(1, 20))
    num_experts = draw(st.sampled_from([0, 1, 16, 256, 257, 60_000]))
    routing = None
    if num_experts:
        layers, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        routing = RoutedExpertsInfo(
            num_layers=layers, top_k=top_k, num_experts=num_experts, dtype=dtype_for(num_experts)
        )
    scenario = make_scenario(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        prompt_len=prompt_len,
        cuts=sorted(draw(st.sets(st.integers(1, num_tokens))) | {num_tokens}),
        start=draw(st.integers(0, prompt_len)),
        routing=routing,
        widths=(draw(st.sampled_from([None, 0, 2])), draw(st.sampled_from([None, 0, 1]))),
    )
    _hand_rows_late(scenario, draw(st.sampled_from([0, 0, 1, 100])))
    if draw(st.booleans()):
        # At most 50 ids, so that a mask fits the smallest segment.
        some_ids = st.lists(st.integers(0, 999), min_size=1, max_size=50)
        masks = draw(st.lists(some_ids, min_size=num_tokens, max_size=num_tokens))
        scenario = with_masks(scenario, masks)
    if not uses_lora:
        return scenario
    lora_versions = draw(st.lists(st.integers(0, 2), min_size=len(scenario.steps), max_size=len(scenario.steps)))
    counts = [len(step.token_ids) for step in scenario.steps]
    arrays = {**scenario.arrays, "lora_versions": np.repeat(np.array(lora_versions, np.int32), counts)}
    return replace(scenario, arrays=arrays, lora_versions=lora_versions)


def simple() -> Scenario:
    """Return a scenario with a prompt of 2 tokens, 2 steps of one token, and routed experts of 1 layer and top 1."""
    routing = RoutedExpertsInfo(num_layers=1, top_k=1, num_experts=4, dtype="u1")
    return make_scenario(np.random.default_rng(0), prompt_len=2, cuts=[1, 2], routing=routing)


# Arrays in their wire format.


def little_endian(array: npt.NDArray[Any], dtype: str) -> bytes:
    """Return the bytes of `array` as `dtype` ('<i4' or '<f4')."""
    return array.astype(dtype, copy=False).tobytes()
