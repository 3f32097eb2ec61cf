"""A client accepts the chunks of a hostile worker only as long as they are valid, and uses bounded memory."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.link_receiver import FrameVerdict, LinkReceiver
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.chunk import Chunk, End, FinishReason, PromptLogprobs, RoutedExperts
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import RemoteProtocolError
from rollbus.schemas.messages import Frame, decode_frame, encode
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.fuzz.mutations import harmed
from tests.support.scenarios import Scenario, scenarios

MAX_TOKENS = 4
PROMPT = [1, 2, 3]
PLAIN = SamplingParams(max_tokens=MAX_TOKENS, logprobs=None)
REQUEST = GenerateRequest(
    prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=MAX_TOKENS, logprobs=None, prompt_logprobs=0)
)


def part(index: int, **fields: object) -> Chunk:
    """Return a chunk without an end."""
    return Chunk(request_id="r", attempt=0, child=0, chunk_index=index, weight_version=0, **fields)  # type: ignore[arg-type]


def rows(index: int) -> Chunk:
    """Return a chunk with one row of routed experts, before all tokens."""
    return part(index, routed_experts=RoutedExperts.from_rows(np.zeros((1, 2, 2), "u1"), index))


def prompt_logprobs(index: int, count: int) -> Chunk:
    """Return a chunk with this number of prompt logprobs, possibly none."""
    return part(index, prompt_logprobs=PromptLogprobs(1 + index * count, np.zeros(count, "<f4").tobytes()))


ENDLESS: dict[str, Callable[[int], Chunk]] = {
    "tokens": lambda index: part(index, token_ids_data=b"\1\0\0\0"),
    "rows": rows,
    "nothing": part,
    "prompt logprobs": lambda index: prompt_logprobs(index, 1),
    "no prompt logprobs": lambda index: prompt_logprobs(index, 0),
}


@pytest.mark.proves("P11")
@pytest.mark.parametrize("kind", ENDLESS)
def test_endless_chunks_are_refused(kind: str) -> None:
    """Valid chunks without an end cause an error as soon as they exceed the request."""
    stream = ResponseStream(REQUEST, child=0, attempt=0, keep=True)
    for index in range(len(PROMPT) + MAX_TOKENS + 1):
        try:
            stream.add(ENDLESS[kind](index))
        except RemoteProtocolError:
            return

    pytest.fail("all were taken")


def test_a_chunk_larger_than_the_request_is_refused() -> None:
    """A single chunk that exceeds the request is rejected, and none of its data is added."""
    stream = ResponseStream(REQUEST, child=0, attempt=0, keep=True)
    with pytest.raises(RemoteProtocolError, match="received 5 tokens and 0 rows; allowed: 4 and 8"):
        stream.add(part(0, token_ids_data=b"\1\0\0\0" * (MAX_TOKENS + 1)))

    assert stream.add(part(0, token_ids_data=b"\1\0\0\0"))


def test_rows_whose_tokens_are_missing_are_refused() -> None:
    """Rows end with the row of the last token at the latest, so that the next attempt has a position to start from."""
    stream = ResponseStream(REQUEST, child=0, attempt=0, keep=True)
    for count in 5, 4:
        ahead = RoutedExperts.from_rows(np.zeros((count, 1, 1), "u1"), 0)
        with pytest.raises(RemoteProtocolError, match="5 rows; allowed: 4 and 4") if count == 5 else nullcontext():
            stream.add(part(0, token_ids_data=b"\1\0\0\0", routed_experts=ahead))

    rest = stream.next_attempt("w", "worker_lost", 0.0)
    assert isinstance(rest, GenerateRequest)
    assert rest.routed_experts_prompt_start == rest.prompt_len == len(PROMPT) + 1


def frames_of(scenario: Scenario, segment_bytes: int) -> Iterator[bytes]:
    """Yield the frames of a correct worker, with one chunk in each frame."""
    for number, chunk in enumerate(scenario.chunks(segment_bytes)):
        yield encode(Frame(WIRE_VERSION, "w", number, [], [chunk], 0, "c"))


@pytest.mark.slow
@given(scenarios(), st.sampled_from([200, 2**20]), st.data())
def test_damaged_frames_deliver_no_more_chunks_than_the_request_allows(
    scenario: Scenario, segment_bytes: int, data: st.DataObject
) -> None:
    """Damaged frames cause an error, or deliver no more chunks than the request allows."""
    stream, receiver = scenario.stream(), LinkReceiver("c")
    delivered = 0
    for clock in itertools.islice(itertools.count(), 3):
        for frame in list(frames_of(scenario, segment_bytes)):
            harm = data.draw(st.booleans())
            sent = data.draw(harmed(st.just(frame))) if harm else frame
            try:
                message = decode_frame(sent)
                if receiver.receive(message, len(sent), float(clock)) is FrameVerdict.ACCEPTED:
                    for chunk in message.chunks:
                        if (chunk.request_id, chunk.attempt, chunk.child) == ("r", 0, 0):
                            delivered += len(stream.add(chunk))
            except RemoteProtocolError:
                continue
        assert receiver.message(window=1000, now=float(clock)).acked >= 0

    sampling, prompt_len = scenario.request.sampling, scenario.request.prompt_len
    assert delivered <= 2 * (prompt_len + (sampling.max_tokens or len(scenario.steps))) + len(scenario.steps) + 2


@pytest.mark.proves("P13")
@pytest.mark.parametrize(
    ("index", "num_tokens", "num_rows", "message"),
    [
        (0, 2, 0, "received chunk 0, expected chunk 1"),
        (2, 2, 0, "received chunk 2, expected chunk 1"),
        (1, 1, 0, "received 2 tokens and 0 rows of 1 and 0"),
        (1, 3, 0, "received 2 tokens and 0 rows of 3 and 0"),
        (1, 2, 1, "received 2 tokens and 0 rows of 2 and 1"),
    ],
)
def test_wrong_numbers_and_totals_are_rejected(index: int, num_tokens: int, num_rows: int, message: str) -> None:
    """A repeated chunk, a gap, and a terminal chunk with other totals than those of the stream are errors."""
    stream = ResponseStream(GenerateRequest(prompt_token_ids=PROMPT, sampling=PLAIN), child=0, attempt=0, keep=True)
    token = {"token_ids_data": b"\1\0\0\0"}
    stream.add(part(0, **token))
    end = End(finish_reason=FinishReason.LENGTH, num_tokens=num_tokens, num_rows=num_rows, cached_tokens=0)
    with pytest.raises(RemoteProtocolError, match=message):
        stream.add(part(index, end=end, **token))
