"""The frames that a worker seals: numbered, complete, within credit and size, and stored until acknowledged."""

import numpy as np
import pytest

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.link_sender import SMALL_BYTES, LinkInstructions, LinkSender, PlainSender
from rollbus.schemas.chunk import ChunkError, FinishReason
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from rollbus.schemas.limits import INITIAL_CREDIT_BYTES
from rollbus.schemas.messages import Frame, LinkMessage, RequestKey, decode_frame
from rollbus.schemas.presence import RoutedExpertsInfo
from tests.support.scenarios import Scenario, assert_complete, make_scenario, simple

MAX_FRAME_BYTES = 64 * 1024 - 4096
"""Frame limit of a server with a `max_payload` of 64 KiB."""
SEGMENT_BYTES = 32 * 1024
ERROR = ChunkError(ErrorCode.WORKER_STOPPED, "stopped")
WIDE = RoutedExpertsInfo(num_layers=64, top_k=16, num_experts=256, dtype="u1")
"""A model with 1 KiB per row."""


def make_sender(max_frame_bytes: int = MAX_FRAME_BYTES) -> LinkSender:
    """Return the sender of a new link."""
    return LinkSender(incarnation="w", link=3, client_incarnation="c", max_frame_bytes=max_frame_bytes)


def make_keys(count: int) -> list[RequestKey]:
    """Return keys with request ids of the maximum length."""
    return [RequestKey(f"{i:0128}") for i in range(count)]


def seal(sender: LinkSender) -> bytes:
    """Seal the next frame, which must exist."""
    data = sender.seal()
    assert data is not None
    return data


def seal_all(sender: LinkSender | PlainSender) -> list[Frame]:
    """Seal and return all frames that may be sent now."""
    if isinstance(sender, PlainSender):
        return [decode_frame(data) for data in sender.frames()]
    frames = []
    while (data := sender.seal()) is not None:
        frames.append(decode_frame(data))
    return frames


def receive_message(sender: LinkSender, *, acked: int = 0, credit: int = 0, resend: bool = False) -> LinkInstructions:
    """Let the sender receive a message of the client."""
    return sender.receive(LinkMessage(WIRE_VERSION, [], "c", "w", 3, acked, credit, resend))


def add_steps(sender: LinkSender, key: RequestKey, scenario: Scenario) -> None:
    """Add all steps of a request at once."""
    for step, version in zip(scenario.steps, scenario.versions, strict=True):
        sender.encode_step(key, step, version)


def long_prompt(num_kib: int) -> Scenario:
    """Return a request of one token whose rows take `num_kib` KiB."""
    return make_scenario(np.random.default_rng(0), prompt_len=num_kib, cuts=[1], routing=WIDE)


def open_request(sender: LinkSender, key: RequestKey, num_kib: int) -> None:
    """Accept a request with this many KiB to send."""
    scenario = long_prompt(num_kib)
    sender.open(key, scenario.writer(SEGMENT_BYTES, key))
    add_steps(sender, key, scenario)


def use_up_credit(sender: LinkSender) -> int:
    """Send data until the credit is used up, and return the number of frames."""
    open_request(sender, make_keys(1)[0], 2 * INITIAL_CREDIT_BYTES // 1024)
    return len(seal_all(sender))


@pytest.mark.proves("P59")
def test_no_frame_is_larger_than_allowed() -> None:
    """Thousands of offers and large chunks are spread in order over frames that fit a `max_payload` of 64 KiB."""
    sender = make_sender()
    receive_message(sender, credit=2**30)
    keys = make_keys(3000)
    scenario = long_prompt(40)
    for key in keys:
        sender.open(key, scenario.writer(SEGMENT_BYTES, key))
    for key in keys[:5]:
        add_steps(sender, key, scenario)
    sealed = []
    while (data := sender.seal()) is not None:
        sealed.append(data)
    frames = [decode_frame(data) for data in sealed]

    assert max(map(len, sealed)) <= MAX_FRAME_BYTES
    assert [key for frame in frames for key in frame.admitted] == keys
    assert [frame.number for frame in frames] == list(range(len(frames)))
    for key in keys[:5]:
        assert_complete(scenario, [c for frame in frames for c in frame.chunks if c.request_id == key.request_id])


def test_one_small_step_is_one_frame_and_without_data_there_is_no_frame() -> None:
    """One step of few requests is one frame with their offers. Without data there is no frame."""
    sender = make_sender()
    scenario = simple()
    assert sender.seal() is None
    for key in make_keys(3):
        sender.open(key, scenario.writer(SEGMENT_BYTES, key))
        sender.encode_step(key, scenario.steps[0], 1)
    (frame,) = seal_all(sender)

    assert (frame.incarnation, frame.link, frame.client_incarnation, frame.number) == ("w", 3, "c", 0)
    assert frame.admitted == make_keys(3)
    assert [chunk.chunk_index for chunk in frame.chunks] == [0, 0, 0]
    for key in make_keys(3):
        sender.encode_step(key, scenario.steps[1], 1)
    assert [chunk.is_terminal for frame in seal_all(sender) for chunk in frame.chunks] == [True] * 3
    assert not sender.keys


def test_steps_without_credit_are_buffered_and_merged() -> None:
    """Without credit no data is sent. After new credit, the buffered steps leave as one chunk."""
    sender = make_sender()
    num_frames = use_up_credit(sender)
    key = RequestKey("late")
    scenario = make_scenario(np.random.default_rng(0), prompt_len=1, cuts=range(1, 31), routing=simple().routing)
    sender.open(key, scenario.writer(SEGMENT_BYTES, key))
    assert [frame.admitted for frame in seal_all(sender)] == [[key]]
    for step in scenario.steps:
        sender.encode_step(key, step, 1)
    assert sender.seal() is None
    assert sender.unsent_bytes(key) == 30 * (4 + 4 + 1)
    receive_message(sender, acked=num_frames, credit=INITIAL_CREDIT_BYTES + 100 * 1024)
    frames = seal_all(sender)
    chunks = [chunk for frame in frames for chunk in frame.chunks if chunk.request_id == "late"]

    assert [chunk.num_tokens for chunk in chunks] == [30]
    assert sender.unsent_bytes(key) == 0


@pytest.mark.proves("P56")
def test_credit_is_exceeded_by_one_frame_at_most() -> None:
    """A frame starts below the granted offset and exceeds it by at most one segment, however much is buffered."""
    sender = make_sender(2**20)
    use_up_credit(sender)
    for key in make_keys(200)[1:]:
        open_request(sender, key, 8)
    seal_all(sender)
    sizes = []
    receive_message(sender, credit=2 * INITIAL_CREDIT_BYTES)
    while (data := sender.seal()) is not None:
        sizes.append(len(data))

    assert len(sizes) > 1
    assert max(sizes) < INITIAL_CREDIT_BYTES + SMALL_BYTES


@pytest.mark.proves("P56")
def test_offers_errors_and_empty_terminal_chunks_are_sent_without_credit() -> None:
    """Offers, errors, rejections and terminal chunks without data are sent without credit."""
    sender = make_sender()
    use_up_credit(sender)
    failed, empty, data, rejected = (RequestKey(name) for name in ("failed", "empty", "data", "rejected"))
    scenario = simple()
    for key in (failed, empty, data):
        sender.open(key, scenario.writer(SEGMENT_BYTES, key))
    sender.encode_step(failed, scenario.steps[0], 1)
    sender.fail(failed, ERROR, 1)
    ending = make_scenario(np.random.default_rng(0), prompt_len=1, cuts=[1]).steps[0]
    ending.token_ids, ending.logprobs = ending.token_ids[:0], None
    sender.encode_step(empty, ending, 1)
    add_steps(sender, data, scenario)
    sender.reject(rejected, ERROR, 1)
    (frame,) = seal_all(sender)

    assert frame.admitted == [failed, empty, data]
    assert [chunk.request_id for chunk in frame.chunks] == ["failed", "empty", "rejected"]
    assert (frame.chunks[0].chunk_index, frame.chunks[0].end.num_tokens) == (0, 0)
    assert list(sender.keys) == [make_keys(1)[0], data]


@pytest.mark.parametrize("error", [ERROR, None])
def test_a_failure_or_an_abort_discards_unsent_data(error: ChunkError | None) -> None:
    """The unsent data of a failed or aborted request is discarded. Its next chunk is the terminal chunk."""
    sender = make_sender()
    num_frames = use_up_credit(sender)
    (key,) = make_keys(1)
    sent = num_frames - 1
    assert sender.unsent_bytes(key) > 0
    if error is None:
        sender.abort(key, 1)
    else:
        sender.fail(key, error, 1)
    (frame,) = seal_all(sender)
    receive_message(sender, acked=num_frames + 1, credit=2**30)

    assert [chunk.error for chunk in frame.chunks] == [error]
    assert frame.chunks[0].finish_reason is (FinishReason.ABORT if error is None else FinishReason.ERROR)
    assert frame.chunks[0].chunk_index in (sent, sent + 1)
    assert sender.seal() is None
    assert sender.is_idle
    assert sender.held_bytes == 0


def test_aborts_send_unsent_tokens_in_their_terminal_chunks_within_credit() -> None:
    """The terminal chunk of an aborted request has its small unsent output, as long as there is credit."""
    sender, scenario = make_sender(), simple()
    keys = make_keys(3)
    for key in keys:
        sender.open(key, scenario.writer(SEGMENT_BYTES, key))
    seal_all(sender)
    for key in keys:
        sender.encode_step(key, scenario.steps[0], 1)
    # Enough for one of them.
    sender._credit = sender._offset + sender._open[keys[0]].next_bytes + 1
    for key in keys:
        sender.abort(key, 1)
    (frame,) = seal_all(sender)

    assert [chunk.finish_reason for chunk in frame.chunks] == 3 * [FinishReason.ABORT]
    assert [chunk.end.num_tokens for chunk in frame.chunks] == [len(scenario.steps[0].token_ids), 0, 0]


def test_a_failed_request_does_not_delay_other_requests() -> None:
    """A request that fails before its large segment was sent does not delay other requests."""
    sender = make_sender()
    first, second = RequestKey("first"), RequestKey("second")
    for key in (first, second):
        open_request(sender, key, 100)
    sent = [chunk.request_id for chunk in decode_frame(seal(sender)).chunks]
    sent += [chunk.request_id for chunk in decode_frame(seal(sender)).chunks]
    sender.fail(first, ERROR, 1)
    frames = seal_all(sender)

    assert sent == ["first", "second"]
    assert [chunk.request_id for chunk in frames[0].chunks] == ["first", "second"]
    assert not sender.keys


def test_the_chunk_about_absent_prompt_logprobs_precedes_the_terminal_chunk() -> None:
    """A prompt of one token has no prompt logprobs. A chunk of its own reports that before the terminal chunk."""
    sender = make_sender()
    key = RequestKey("r")
    scenario = make_scenario(np.random.default_rng(0), prompt_len=1, cuts=[1], widths=(None, 0))
    (ending,) = scenario.steps
    ending.token_ids = ending.token_ids[:0]
    sender.open(key, scenario.writer(SEGMENT_BYTES, key))
    sender.encode_step(key, ending, 1)
    (frame,) = seal_all(sender)

    assert [(chunk.prompt_logprobs is None, chunk.is_terminal) for chunk in frame.chunks] == [
        (False, False),
        (True, True),
    ]


def test_requests_with_large_segments_take_turns_after_all_small_chunks() -> None:
    """Each frame has all small chunks and one large segment. Requests with large segments take turns."""
    sender = make_sender()
    receive_message(sender, credit=2**30)
    first, second, small = (RequestKey(name) for name in ("first", "second", "small"))
    open_request(sender, first, 100)
    open_request(sender, second, 70)
    tokens = make_scenario(np.random.default_rng(0), prompt_len=1, cuts=range(1, 11))
    sender.open(small, tokens.writer(SEGMENT_BYTES, small))
    order = []
    for step in tokens.steps:
        sender.encode_step(small, step, 1)
        order.append([chunk.request_id for chunk in decode_frame(seal(sender)).chunks])

    assert order[:3] == [["small", "first"], ["small", "second"], ["small", "first"]]
    assert all("small" in row for row in order)
    assert [row.count("first") for row in order] == [1, 0, 1, 0, 1, 1, 0, 0, 0, 0]


@pytest.mark.proves("P55")
def test_unacknowledged_frames_are_sent_again_unchanged() -> None:
    """A resend repeats all frames from the first missing frame without a change, also frames sealed since then."""
    sender = make_sender()
    scenario = simple()
    sealed: list[bytes] = []
    for key in make_keys(4):
        sender.open(key, scenario.writer(SEGMENT_BYTES, key))
        sealed.append(seal(sender))
    progress = receive_message(sender, acked=1, resend=True)
    add_steps(sender, make_keys(1)[0], scenario)
    sealed.append(seal(sender))

    assert progress == LinkInstructions(sealed[1:4], make_keys(1))
    assert receive_message(sender, acked=2, resend=True) == LinkInstructions(sealed[2:], make_keys(2)[1:])
    assert receive_message(sender, acked=2) == LinkInstructions()
    assert receive_message(sender, acked=5).confirmed == make_keys(4)[2:]
    assert sender.held_bytes == 0


def test_a_heartbeat_names_the_next_frame() -> None:
    """A heartbeat has the next frame number. It is not numbered, not stored and uses no credit."""
    sender = make_sender()
    wants_at_first = sender.needs_heartbeat
    sender.open(RequestKey("r"), simple().writer(SEGMENT_BYTES))
    sender.seal()
    heartbeats = [decode_frame(sender.heartbeat()) for _ in range(2)]

    assert (wants_at_first, sender.needs_heartbeat) == (False, True)
    assert all(heartbeat.is_heartbeat and heartbeat.number == 1 for heartbeat in heartbeats)
    assert (heartbeats[0].incarnation, heartbeats[0].link, heartbeats[0].client_incarnation) == ("w", 3, "c")
    assert receive_message(sender, acked=1, resend=True).resend == []


def test_an_ack_beyond_the_last_frame_is_refused() -> None:
    """An ack beyond the last frame is a protocol error, and the whole message is ignored."""
    sender = make_sender()
    sender.open(RequestKey("r"), simple().writer(SEGMENT_BYTES))
    sender.seal()
    with pytest.raises(RemoteProtocolError, match="acknowledged 2 frames, but only 1 were sent"):
        receive_message(sender, acked=2, credit=2**40)

    assert sender.held_bytes > 0
    assert receive_message(sender, acked=1).confirmed == [RequestKey("r")]


def test_outdated_messages_change_nothing() -> None:
    """Acks and credit never decrease. Messages about another link, incarnation or client are ignored."""
    sender = make_sender()
    use_up_credit(sender)
    receive_message(sender, acked=3, credit=2**20)
    held = sender.held_bytes
    others = [("x", "w", 3), ("c", "x", 3), ("c", "w", 2), ("c", "", 3)]
    for client, incarnation, link in others:
        message = LinkMessage(WIRE_VERSION, [], client, incarnation, link, 5, 2**40, True)
        assert sender.receive(message) == LinkInstructions()

    assert receive_message(sender, acked=2, credit=0) == LinkInstructions()
    assert sender.held_bytes == held
    assert len(seal_all(sender)) > 1


def test_a_client_that_requests_acknowledged_frames_needs_a_new_link() -> None:
    """If a client requests frames that it has acknowledged, the worker must start a new link."""
    sender = make_sender()
    use_up_credit(sender)
    receive_message(sender, acked=3)

    assert receive_message(sender, acked=0, resend=True) == LinkInstructions(needs_new_link=True)
    assert not receive_message(sender, acked=3, resend=True).needs_new_link


def test_a_key_can_be_opened_again_only_after_its_terminal_chunk() -> None:
    """A key can be opened again only after its terminal chunk has left. Steps and failures need an open key."""
    sender = make_sender()
    key = RequestKey("r")
    with pytest.raises(KeyError):
        sender.encode_step(key, simple().steps[0], 1)
    with pytest.raises(KeyError):
        sender.fail(key, ERROR, 1)
    sender.open(key, simple().writer(SEGMENT_BYTES))
    with pytest.raises(ValueError, match="is open"):
        sender.open(key, simple().writer(SEGMENT_BYTES))
    with pytest.raises(ValueError, match="is open"):
        sender.reject(key, ERROR, 1)
    sender.fail(key, ERROR, 1)
    sender.open(key, simple().writer(SEGMENT_BYTES))

    assert list(sender.keys) == [key]


def test_an_invalid_step_does_not_change_the_buffer() -> None:
    """An invalid step is rejected and does not change the sender's buffer."""
    sender = make_sender()
    key, scenario = RequestKey("r"), simple()
    sender.open(key, scenario.writer(SEGMENT_BYTES))
    sender.encode_step(key, scenario.steps[0], 1)
    held = sender.held_bytes
    with pytest.raises(LocalProtocolError):
        sender.encode_step(key, scenario.steps[0], 1)

    assert sender.held_bytes == held


def test_frames_for_a_program_without_a_link_are_numbered_from_zero() -> None:
    """A program without a link gets frames from 0. The first has the offer, and no frame exceeds the limit."""
    scenario = long_prompt(100)
    key = RequestKey("r")
    sender = PlainSender(key, scenario.writer(SEGMENT_BYTES), incarnation="w", max_frame_bytes=MAX_FRAME_BYTES)
    (first,) = seal_all(sender)
    for step, version in zip(scenario.steps, scenario.versions, strict=True):
        sender.encode_step(key, step, version)
    had_left = sender.has_left
    sealed = sender.frames()
    frames = [first, *map(decode_frame, sealed)]

    assert (first.admitted, first.chunks) == ([key], [])
    assert max(map(len, sealed)) <= MAX_FRAME_BYTES
    assert [frame.number for frame in frames] == list(range(len(frames)))
    assert {(frame.link, frame.client_incarnation) for frame in frames} == {(0, "")}
    assert_complete(scenario, [chunk for frame in frames for chunk in frame.chunks])
    assert (had_left, sender.has_left) == (False, True)
    assert sender.frames() == []


def test_a_plain_request_that_fails_before_its_first_frame_is_rejected() -> None:
    """An error before the first frame rejects a plain request without an offer. A later error ends the request."""
    writer = ChunkWriter(RequestKey("r"), prompt_len=1, routing=None, start=0, segment_bytes=SEGMENT_BYTES)
    sender = PlainSender(RequestKey("r"), writer, incarnation="w", max_frame_bytes=MAX_FRAME_BYTES)
    sender.fail(RequestKey("r"), ERROR, 1)
    had_left = sender.has_left
    (frame,) = seal_all(sender)

    assert frame.admitted == []
    assert [chunk.error for chunk in frame.chunks] == [ERROR]
    assert (had_left, sender.has_left) == (False, True)
    with pytest.raises(LocalProtocolError):
        sender.fail(RequestKey("r"), ERROR, 1)


def test_a_stall_lasts_until_there_is_credit() -> None:
    """A stall counts once until new credit arrives, however many tokens arrive and however often a frame is requested.

    The next stall counts again.
    """
    sender = make_sender()
    first, second, third = make_keys(3)
    open_request(sender, first, 2 * INITIAL_CREDIT_BYTES // 1024)
    seal_all(sender)
    open_request(sender, second, 2 * INITIAL_CREDIT_BYTES // 1024)
    assert len(seal_all(sender)) == 1
    assert seal_all(sender) == []
    once = sender.credit_stalls
    receive_message(sender, credit=2 * INITIAL_CREDIT_BYTES)
    seal_all(sender)
    twice = sender.credit_stalls
    receive_message(sender, credit=2**30)
    open_request(sender, third, 1)
    seal_all(sender)

    assert (once, twice, sender.credit_stalls) == (1, 2, 2)


def test_data_that_needs_no_credit_causes_no_stall() -> None:
    """Used up credit is a stall only if tokens wait for it. Offers and terminal chunks need no credit."""
    sender = make_sender()
    first, second, third = make_keys(3)
    open_request(sender, first, INITIAL_CREDIT_BYTES // 1024 - 1)
    seal_all(sender)
    sender.open(second, simple().writer(SEGMENT_BYTES, second))
    seal_all(sender)
    sender.abort(second, 1)
    seal_all(sender)
    before = sender.credit_stalls
    open_request(sender, third, 1)
    seal_all(sender)

    assert (before, sender.credit_stalls) == (0, 1)
