"""The end of a response stream that is aborted, or whose attempt no worker accepted."""

import numpy as np
import pytest

from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.chunk import Chunk, End, FinishReason, RoutedExperts
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams


def request() -> GenerateRequest:
    """Return a request with two prompt tokens and without log probabilities."""
    sampling = SamplingParams(max_tokens=3, temperature=0, logprobs=None)
    return GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling, request_id="r")


def chunk(index: int, *tokens: int, rows: tuple[int, int] | None = None, attempt: int = 0, end: bool = False) -> Chunk:
    """Return a chunk with tokens, and rows of (first position, count)."""
    experts = None
    if rows is not None:
        experts = RoutedExperts.from_rows(np.zeros((rows[1], 1, 1), "u1"), rows[0])
    total = End(finish_reason=FinishReason.LENGTH, num_tokens=3, num_rows=4, routed_experts_start=0)
    return Chunk(
        request_id="r",
        attempt=attempt,
        child=0,
        chunk_index=index,
        weight_version=5,
        token_ids_data=np.array(tokens, "<i4").tobytes(),
        routed_experts=experts,
        end=total if end else None,
        lora_version=2,
    )


def test_an_aborted_stream_ends_with_what_was_delivered() -> None:
    """The terminal chunk of an aborted stream counts delivered tokens and rows, but no rows that wait for tokens."""
    stream = ResponseStream(request(), child=0, attempt=0, keep=True)
    stream.add(chunk(0, 7, rows=(0, 2)))
    assert stream.add(chunk(1, rows=(2, 1))) == []
    last = stream.abort()

    assert last.end is not None
    assert (last.finish_reason, last.chunk_index) == ("abort", 1)
    assert (last.weight_version, last.lora_version) == (5, 2)
    assert (last.end.num_tokens, last.end.num_rows, last.end.routed_experts_start) == (1, 2, 0)
    assert stream.end == last.end
    assert list(stream.arrays()["token_ids"]) == [7]
    assert len(stream.arrays()["routed_experts"]) == 2


def test_a_stream_can_be_aborted_before_its_first_chunk() -> None:
    """A stream that is aborted before its first chunk has only a terminal chunk."""
    stream = ResponseStream(request(), child=0, attempt=3, keep=False)
    last = stream.abort()

    assert last.end is not None
    assert (last.chunk_index, last.end.num_tokens, last.end.num_rows) == (0, 0, 0)


@pytest.mark.proves("P50")
def test_a_withdrawn_attempt_does_not_count() -> None:
    """A withdrawn attempt changes only the number on the wire. It does not count as an attempt."""
    stream = ResponseStream(request(), child=0, attempt=0, keep=True)
    stream.withdraw()
    assert (stream.attempt, stream.num_attempts) == (1, 1)
    delivered = stream.add(chunk(0, 7, 8, 9, rows=(0, 4), attempt=1, end=True))

    assert [each.chunk_index for each in delivered] == [0]
    assert stream.num_attempts == 1


def test_lost_attempts_count_beside_withdrawn_attempts() -> None:
    """A lost attempt counts, before and after a withdrawn attempt."""
    stream = ResponseStream(request(), child=0, attempt=4, keep=True)
    stream.next_attempt()
    stream.withdraw()
    stream.next_attempt()

    assert (stream.attempt, stream.num_attempts) == (7, 3)
