"""The frames that a worker seals: numbered, whole, and never larger than a message may be."""

import numpy as np

from bus.protocol.link import Link
from bus.protocol.outbox import Outbox
from schemas.chunk import Chunk, RoutedExperts
from schemas.messages import RequestKey, decode_frame

MAX_FRAME_BYTES = 256 * 1024


def keys(count: int) -> list[RequestKey]:
    """Keys with the longest ids there are."""
    return [RequestKey(f"{i:0128}") for i in range(count)]


def chunk_for(key: RequestKey, num_rows: int) -> Chunk:
    """The first chunk of a request, with routing of 64 bytes a row."""
    rows = RoutedExperts.from_rows(np.zeros((num_rows, 8, 8), np.uint8), 0)
    return Chunk(request_id=key.request_id, attempt=0, child=0, chunk_index=0, weight_version=0, routed_experts=rows)


def test_no_frame_is_larger_than_allowed() -> None:
    """Thousands of admissions and large chunks in one step are spread over frames that each fit, in order."""
    outbox = Outbox("i", MAX_FRAME_BYTES)
    for key in keys(3000):
        outbox.admit(key)
    for key in keys(20):
        outbox.add(chunk_for(key, 2000))
    sealed = outbox.seal()
    frames = [decode_frame(data) for data in sealed]

    assert max(map(len, sealed)) <= MAX_FRAME_BYTES
    assert [key for frame in frames for key in frame.admitted] == keys(3000)
    assert [chunk.request_id for frame in frames for chunk in frame.chunks] == [key.request_id for key in keys(20)]
    assert [frame.number for frame in frames] == list(range(len(frames)))


def test_little_is_one_frame_and_nothing_is_none() -> None:
    """One step of few requests is one message; a step without any for this client is none; numbers go on."""
    outbox = Outbox("i", MAX_FRAME_BYTES)
    for key in keys(3):
        outbox.admit(key)
        outbox.add(chunk_for(key, 1))
    (first,) = outbox.seal()
    assert outbox.seal() == []
    outbox.add(chunk_for(keys(1)[0], 1))
    (second,) = outbox.seal()

    link = Link()
    assert link.receive(decode_frame(first))
    assert link.receive(decode_frame(second))
    assert not link.receive(decode_frame(second))
