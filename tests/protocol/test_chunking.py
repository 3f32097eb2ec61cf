"""How engine steps become chunks: chunks fit, buffered steps merge, and no chunk has rows ahead of its tokens."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.protocol.stream.buffers import KEPT_BYTES, RowBuffer
from rollbus.bus.protocol.stream.chunk_writer import CHUNK_OVERHEAD_BYTES, ChunkWriter, chunk_bytes
from rollbus.bus.protocol.stream.engine_step import (
    MAX_RUN_BYTES,
    MAX_RUN_TOKENS,
    RequestStep,
    TokenBatch,
    TokenBatcher,
    TokenRun,
)
from rollbus.bus.protocol.stream.response_stream import ChunkVerifier, ResponseStream
from rollbus.schemas.chunk import Chunk, ChunkError, FinishReason
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import ErrorCode, LocalProtocolError
from rollbus.schemas.messages import Frame, RequestKey, encode
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import Rows
from rollbus.schemas.sampling import SamplingParams
from tests.support.scenarios import Scenario, assert_complete, drain, make_scenario, scenarios, simple

STOPPED = ChunkError(ErrorCode.WORKER_STOPPED, "stopped")
WIDE = RoutedExpertsInfo(num_layers=10, top_k=10, num_experts=256, dtype="u1")
"""A model with 100 bytes per row."""


def num_rows(chunk: Chunk) -> int:
    """Return the number of rows in a chunk."""
    return 0 if chunk.routed_experts is None else chunk.routed_experts.shape[0]


def step_without_tokens(reason: FinishReason | None = None, error: str | None = None) -> RequestStep:
    """Return a step without tokens."""
    return RequestStep(key="k", token_ids=np.empty(0, np.int32), finish_reason=reason, error=error)


@given(scenarios(), st.integers(1, 200), st.integers(1, 5))
def test_a_chunk_is_no_larger_than_segment_bytes(scenario: Scenario, segment_bytes: int, gather: int) -> None:
    """The arrays of a chunk take at most `segment_bytes`, unless a single token or row is larger.

    The size estimate bounds the encoded chunk.
    """
    for chunk in scenario.chunks(segment_bytes, gather):
        size = chunk_bytes(chunk)
        parts = max(chunk.num_tokens, num_rows(chunk), 0 if chunk.prompt_logprobs is None else 1)
        assert size - CHUNK_OVERHEAD_BYTES - len("r") <= segment_bytes or parts == 1
        assert len(encode(Frame(WIRE_VERSION, "i", 0, [], [chunk]))) <= size


@given(scenarios() | scenarios(uses_lora=True), st.integers(1, 200), st.integers(1, 5))
def test_sent_rows_belong_to_sent_tokens_and_no_chunk_mixes_versions(
    scenario: Scenario, segment_bytes: int, gather: int
) -> None:
    """After a chunk with tokens, the sent rows belong to the sent tokens.

    No chunk mixes versions of the weights or of an adapter.
    """
    tokens = rows = 0
    lp, start = scenario.request.prompt_len, scenario.request.routed_experts_prompt_start
    for chunk in scenario.chunks(segment_bytes, gather):
        for name, version in (("weight_versions", chunk.weight_version), ("lora_versions", chunk.lora_version)):
            versions = scenario.arrays[name]
            assert versions is None or set(versions[tokens : tokens + chunk.num_tokens]) <= {version}
        tokens += chunk.num_tokens
        rows += num_rows(chunk)
        # A chunk without tokens may contain rows of the next token.
        assert rows <= lp - start + tokens - (chunk.num_tokens > 0)


@given(scenarios(), st.integers(1, 200), st.data())
def test_next_bytes_is_the_size_bound_of_the_next_chunk(
    scenario: Scenario, segment_bytes: int, data: st.DataObject
) -> None:
    """`next_bytes` is the size bound of the next chunk and 0 exactly if there is none.

    A smaller limit returns no chunk.
    """
    writer = scenario.writer(segment_bytes)
    for step, version in zip(scenario.steps, scenario.versions, strict=True):
        writer.append_step(step, version)
        while data.draw(st.booleans()) and writer.has_unsent:
            size = writer.next_bytes
            assert writer.next_chunk(size - 1) is None
            chunk = writer.next_chunk(size)
            assert chunk_bytes(chunk) <= writer.last_bytes == size
    drain(writer)

    assert (writer.next_bytes, writer.unsent_bytes, writer.has_unsent) == (0, 0, False)
    assert writer.is_ended
    assert writer.has_left


@pytest.mark.parametrize("error", [STOPPED, None])
@given(scenario=scenarios(), segment_bytes=st.integers(1, 200), data=st.data())
def test_a_failure_or_an_abort_discards_unsent_data(
    error: ChunkError | None, scenario: Scenario, segment_bytes: int, data: st.DataObject
) -> None:
    """At any point, the chunk after a failure or an abort is terminal, and its totals are those of the sent chunks.

    Some tokens are unsent here, or the engine has not ended the request.
    """
    writer = scenario.writer(segment_bytes)
    chunks = []
    ends_after = data.draw(st.integers(0, len(scenario.steps)))
    for step, version in zip(scenario.steps[:ends_after], scenario.versions, strict=False):
        writer.append_step(step, version)
        chunks += [chunk for _ in range(data.draw(st.integers(0, 3))) if (chunk := writer.next_chunk()) is not None]

    def end() -> Chunk:
        return writer.abort(1) if error is None else writer.fail(error, 1)

    if not writer.has_left:
        last = end()
        assert (last.chunk_index, last.error, last.num_tokens) == (len(chunks), error, 0)
        assert last.finish_reason is (FinishReason.ABORT if error is None else FinishReason.ERROR)
        assert last.end.num_tokens == sum(chunk.num_tokens for chunk in chunks)
        assert last.weight_version == 1 or writer.taken_tokens
        assert last.end.num_rows == sum(map(num_rows, chunks))
        assert (writer.unsent_bytes, writer.has_unsent, writer.has_left) == (0, False, True)
        assert writer.next_chunk() is None
    with pytest.raises(LocalProtocolError, match="after its terminal chunk"):
        end()


@pytest.mark.parametrize("num_sent", [0, 1, 2])
def test_an_abort_after_the_last_step_keeps_its_finish_reason(num_sent: int) -> None:
    """An abort keeps the engine's finish reason if no output is lost, because nothing is left to generate."""
    writer = ChunkWriter(RequestKey("r"), prompt_len=1, routing=None, start=0, segment_bytes=1000)
    for index, token in enumerate((7, 8)):
        reason = FinishReason.STOP if index == 1 and num_sent < 2 else None
        writer.append_step(RequestStep(key="r", token_ids=np.array([token], "i4"), finish_reason=reason), 1)
        if index < num_sent:
            assert writer.next_chunk() is not None
    if num_sent == 2:
        ending = RequestStep(key="r", token_ids=np.array([], "i4"), finish_reason=FinishReason.STOP, kv_params=b"kv")
        writer.append_step(ending, 1)
    last = writer.abort(1, keeps=num_sent < 2)

    assert (last.finish_reason, last.num_tokens, last.end.num_tokens) == (FinishReason.STOP, 2 - num_sent, 2)
    assert last.end.kv_params is None


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("limit", "expected"), [(2, ("length", None)), (3, ("abort", None)), (9, ("stop", 9))])
def test_an_abort_after_the_last_token_is_no_abort_for_the_client(
    keep: bool, limit: int, expected: tuple[str, int | None]
) -> None:
    """A stream that its worker aborts after the last token has the finish reason of its tokens.

    Otherwise its caller would continue a complete answer.
    """
    sampling = SamplingParams(max_tokens=limit, stop_token_ids=(9,), logprobs=None)
    asked = GenerateRequest(prompt_token_ids=[1], sampling=sampling, request_id="r")
    stream = ResponseStream(asked, child=0, attempt=0, keep=keep)
    writer = ChunkWriter(RequestKey("r"), prompt_len=1, routing=None, start=0, segment_bytes=1000)
    writer.append_step(RequestStep(key="r", token_ids=np.array([7, 9 if limit == 9 else 8], "i4")), 1)
    [ended] = stream.add(writer.abort(1, keeps=True))

    assert (ended.end.finish_reason, ended.end.stop_reason) == expected
    assert stream.end == ended.end


@pytest.mark.proves("P16")
def test_steps_that_wait_for_credit_leave_as_one_chunk() -> None:
    """Steps of one weight version that wait for credit leave as one chunk. The next version starts another chunk."""
    scenario = make_scenario(np.random.default_rng(0), prompt_len=3, cuts=[1, 2, 5, 6, 7], routing=WIDE)
    writer = scenario.writer()
    for step, version in zip(scenario.steps, [1, 1, 1, 2, 2], strict=True):
        writer.append_step(step, version)
    first, second = drain(writer)

    assert (first.weight_version, first.num_tokens, num_rows(first)) == (1, 5, 3 + 5 - 1)
    assert (second.weight_version, second.num_tokens, num_rows(second)) == (2, 2, 2)
    assert second.is_terminal


def test_a_changed_adapter_starts_another_chunk() -> None:
    """Buffered tokens leave as separate chunks if the adapter changed, appeared or disappeared between them."""
    scenario = make_scenario(np.random.default_rng(0), prompt_len=3, cuts=[1, 2, 3, 4], routing=WIDE)
    writer = scenario.writer()
    for step, lora_version in zip(scenario.steps, [4, 5, 5, None], strict=True):
        writer.append_step(step, 1, lora_version)

    assert [(chunk.lora_version, chunk.num_tokens) for chunk in drain(writer)] == [(4, 1), (5, 2), (None, 1)]


def test_the_terminal_chunk_has_the_adapter_version_of_the_last_step() -> None:
    """The terminal chunk of an aborted request has the adapter version of its last step."""
    scenario = simple()
    writer = scenario.writer()
    writer.append_step(scenario.steps[0], 1, 6)

    assert writer.abort(2).lora_version == 6


def test_only_the_first_chunk_has_the_traceparent() -> None:
    """Only the first chunk carries the traceparent, whether it has tokens or only the end. Its size includes it."""
    for is_ended in (False, True):
        writer = ChunkWriter(
            RequestKey("r"), prompt_len=1, routing=None, start=0, segment_bytes=1000, traceparent="t" * 55
        )
        assert writer.next_bytes == 0
        if not is_ended:
            writer.append_step(RequestStep(key="r", token_ids=np.array([1], "i4")), 1)
            expected_bytes = writer.next_bytes
            chunk = writer.next_chunk()
            assert (chunk.traceparent, chunk_bytes(chunk)) == ("t" * 55, expected_bytes)
        assert (writer.abort(1).traceparent is not None) is is_ended


def test_rows_of_a_long_prompt_leave_in_several_chunks() -> None:
    """Rows of a long prompt leave in several chunks before the first token. The chunk of that token has the rest."""
    scenario = make_scenario(np.random.default_rng(0), prompt_len=25, cuts=[1], routing=WIDE)
    chunks = scenario.chunks(segment_bytes=1000)

    assert [(num_rows(chunk), chunk.num_tokens) for chunk in chunks] == [(10, 0), (10, 0), (5, 1)]
    assert_complete(scenario, chunks)


def test_merged_tokens_keep_their_rows() -> None:
    """A backlog above the chunk size is split into chunks with tokens and the rows of these tokens."""
    scenario = make_scenario(np.random.default_rng(0), prompt_len=1, cuts=range(1, 31), routing=WIDE)
    writer = scenario.writer(segment_bytes=1080)
    for step in scenario.steps:
        writer.append_step(step, 1)

    assert [(chunk.num_tokens, num_rows(chunk)) for chunk in drain(writer)] == [(10, 10)] * 3


def test_rows_that_an_engine_returns_at_the_end_follow_the_tokens() -> None:
    """If an engine returns all rows at the end, the tokens leave before them.

    The terminal chunk leaves after the rows.
    """
    scenario = make_scenario(np.random.default_rng(0), prompt_len=20, cuts=[1, 2], routing=WIDE)
    first, last = scenario.steps
    rows = scenario.arrays["routed_experts"]
    first.routed_experts, last.routed_experts, last.routed_experts_start = None, rows, 0
    chunks = scenario.chunks(segment_bytes=1000)

    assert [(num_rows(chunk), chunk.num_tokens) for chunk in chunks] == [(0, 1), (10, 0), (10, 0), (1, 1)]
    assert_complete(scenario, chunks)


def test_the_last_chunk_of_rows_without_tokens_is_terminal() -> None:
    """If the last step has only rows, in several chunks, the last of these chunks is terminal."""
    scenario = make_scenario(np.random.default_rng(0), prompt_len=20, cuts=[2, 2], routing=WIDE)
    first, last = scenario.steps
    first.routed_experts, first.finish_reason = None, None
    last.routed_experts, last.routed_experts_start = scenario.arrays["routed_experts"], 0
    chunks = scenario.chunks(segment_bytes=1000)

    assert [(num_rows(chunk), chunk.num_tokens) for chunk in chunks] == [(0, 2), (10, 0), (10, 0), (1, 0)]
    assert_complete(scenario, chunks)


def test_later_changes_of_the_engines_arrays_do_not_change_chunks() -> None:
    """The writer copies the arrays of a step, because an engine may reuse their memory while a client is slow."""
    scenario = simple()
    writer = scenario.writer()
    arrays = [np.array(array) for array in (scenario.arrays["token_ids"], scenario.arrays["routed_experts"])]
    for step, version in zip(scenario.steps, scenario.versions, strict=True):
        writer.append_step(step, version)
        step.token_ids[:] = 0
        step.routed_experts[:] = 0
    chunks = drain(writer)
    scenario.arrays["token_ids"], scenario.arrays["routed_experts"] = arrays

    assert_complete(scenario, chunks)


def test_a_request_that_fails_before_all_rows_ends_with_the_engine_error() -> None:
    """A request that the engine fails before all rows ends with the engine's error, not with an error about rows."""
    scenario = simple()
    writer = scenario.writer()
    scenario.steps[0].routed_experts = None
    writer.append_step(scenario.steps[0], 1)
    drain(writer)
    writer.append_step(step_without_tokens(FinishReason.ERROR, "out of numbers" * 100), 1)
    size = writer.next_bytes
    (chunk,) = drain(writer)

    assert chunk_bytes(chunk) <= size
    assert (chunk.error.code, chunk.error.message) == (ErrorCode.ENGINE_ERROR, "out of numbers" * 100)


def test_an_abort_before_the_first_token_has_no_rows() -> None:
    """A result without tokens is valid. Its routed experts are an array of zero rows with the model's shape."""
    scenario = simple()
    writer, stream = scenario.writer(), scenario.stream()
    writer.append_step(step_without_tokens(FinishReason.ABORT), 1)
    assert writer.unsent_bytes == 0
    (chunk,) = drain(writer)
    stream.add(chunk)

    assert stream.arrays()["routed_experts"].shape == (0, 1, 1)
    assert len(stream.arrays()["token_ids"]) == 0


def test_a_start_at_the_prompt_end_with_one_token_has_no_rows() -> None:
    """With `start` equal to the prompt length and one token, there are zero rows.

    The terminal chunk repeats the applied start.
    """
    scenario = make_scenario(np.random.default_rng(0), prompt_len=2, start=2, cuts=[1], routing=simple().routing)
    (chunk,) = scenario.chunks()

    assert (chunk.routed_experts.start, chunk.routed_experts.shape) == (2, (0, 1, 1))
    assert chunk.end.routed_experts_start == 2


def test_a_step_without_content_makes_no_chunk() -> None:
    """A step without content makes no chunk and uses no chunk number."""
    writer = simple().writer()
    writer.append_step(step_without_tokens(), 1)

    assert writer.next_chunk() is None
    assert not writer.has_unsent


def broken_steps() -> list[tuple[RequestStep, str]]:
    """Return invalid second steps of `simple`, each with the error."""
    good = simple().steps[1]
    top = make_scenario(np.random.default_rng(0), prompt_len=2, cuts=[3], widths=(2, None)).steps[0].top_logprobs
    return [
        (replace(good, routed_experts=None), "2 rows for 2 tokens"),
        (replace(good, routed_experts_start=1), "rows from position 1, expected 2"),
        (replace(good, routed_experts=np.zeros((3, 1, 1), np.uint8)), "5 rows for at most 4 positions"),
        (replace(good, routed_experts=np.zeros((1, 2, 1), np.uint8)), "rows of (2, 1) uint8"),
        (replace(good, routed_experts=np.zeros((1, 1, 1), np.uint16)), "rows of (1, 1) uint16"),
        (replace(good, logprobs=np.zeros(0, np.float32)), "1 tokens but 0 logprobs"),
        (replace(good, top_logprobs=top), "another number of top logprobs"),
        (replace(good, finish_reason=FinishReason.ERROR), "finish reason error and error None"),
    ]


@pytest.mark.parametrize(("broken", "problem"), broken_steps(), ids=[problem for _, problem in broken_steps()])
def test_after_an_invalid_step_the_next_chunk_is_the_error_with_correct_totals(
    broken: RequestStep, problem: str
) -> None:
    """A rejected step has no effect: the next chunk is the error, with correct totals."""
    scenario = simple()
    writer = scenario.writer()
    assembly = ChunkVerifier(scenario.request)
    writer.append_step(scenario.steps[0], 1)
    for chunk in drain(writer):
        assembly.add(chunk)
    with pytest.raises(LocalProtocolError, match=re.escape(problem)):
        writer.append_step(broken, 1)
    assert not writer.has_unsent
    assembly.add(writer.fail(STOPPED, 1))

    assert assembly.end.error == STOPPED


def test_a_step_after_the_last_step_is_refused() -> None:
    """A step after the last step of a request raises an error, also while the terminal chunk waits for credit."""
    scenario = simple()
    writer = scenario.writer()
    for step in scenario.steps:
        writer.append_step(step, 1)
    with pytest.raises(LocalProtocolError, match="after the request's last step"):
        writer.append_step(step_without_tokens(), 1)

    assert len(drain(writer)) == 1


def test_a_request_without_routed_experts_ignores_rows() -> None:
    """Without requested routed experts, no rows are sent, even if the engine returns some."""
    scenario = simple()
    writer = ChunkWriter(RequestKey("r"), prompt_len=2, routing=None, start=0, segment_bytes=1000)
    for step in scenario.steps:
        writer.append_step(step, 1)
    (chunk,) = drain(writer)

    assert chunk.routed_experts is None
    assert chunk.end.routed_experts_start is None


ROW = (4, 2)
ROW_BYTES = 8
NUM_LARGE = KEPT_BYTES // ROW_BYTES


def rows_of(count: int, first: int = 0) -> Rows:
    """Return u1[count, 4, 2], with values that differ from their neighbours."""
    rows: Rows = ((np.arange(count * ROW_BYTES) + first) % 251).astype("u1").reshape(count, *ROW)
    return rows


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, NUM_LARGE - 1, NUM_LARGE, NUM_LARGE + 5]), max_size=8),
    takes=st.lists(st.integers(0, 3 * NUM_LARGE * ROW_BYTES), max_size=12),
)
def test_bytes_keep_their_order_for_any_sizes_of_steps_and_chunks(sizes: list[int], takes: list[int]) -> None:
    """The bytes keep their order for any sizes of steps and chunks."""
    run, expected = RowBuffer(), b""
    for i, size in enumerate(sizes):
        rows = rows_of(size, i)
        run.add(rows)
        expected += rows.tobytes()
    taken = b""
    for take in takes:
        part = bytes(run.pop(min(take, len(expected) - len(taken))))
        taken += part
    rest = len(expected) - len(taken)
    assert taken + bytes(run.pop(rest)) == expected


def test_a_prompt_s_rows_are_not_copied() -> None:
    """A chunk of a prompt's rows is a view of the engine's array."""
    rows, run = rows_of(NUM_LARGE), RowBuffer()
    run.add(rows)
    assert np.shares_memory(np.frombuffer(run.pop(100), "u1"), rows)


def test_a_small_part_of_a_large_array_is_copied() -> None:
    """A small part of a large array is copied, so that a slow client does not keep the whole array in memory."""
    rows, run = rows_of(4 * NUM_LARGE), RowBuffer()
    run.add(rows[:NUM_LARGE])
    assert not np.shares_memory(np.frombuffer(run.pop(100), "u1"), rows)


# Token batching: tokens that arrive step by step for many requests leave as one run per request.


NAMES = [f"r{i}" for i in range(100)]
ROW_SHAPE = (2, 3)


def batch_of(keys: list[str], step: int, starts: dict[str, int] | None = None, *, logprobs: bool = True) -> TokenBatch:
    """Return a batch whose token ids encode request and step, with rows from `starts` on if given."""
    numbers = np.array([1000 * NAMES.index(key) + step for key in keys], np.int32)
    return TokenBatch(
        keys=keys,
        token_ids=numbers,
        logprobs=-numbers.astype(np.float32) if logprobs else None,
        routed_experts=None if starts is None else np.repeat(numbers % 251, 6).astype(np.uint8).reshape(-1, *ROW_SHAPE),
        routed_experts_starts=None if starts is None else np.array([starts[key] for key in keys], np.int64),
    )


def add(gathering: TokenBatcher, batch: TokenBatch, version: int) -> list[str]:
    """Add a batch. Its requests without a slot get one. Return the requests whose runs are full."""
    assert gathering.takes(batch, version)
    for key in np.array(batch.keys)[gathering.find_slots(batch.keys) < 0].tolist():
        gathering.open(key, 0.0)
    return gathering.add(batch, gathering.find_slots(batch.keys), 0.0)[0]


def check(run: TokenRun | None, key: str, steps: list[int], start: int | None) -> None:
    """Assert that the run contains exactly the request's tokens of these steps."""
    numbers = np.array([1000 * NAMES.index(key) + step for step in steps])
    np.testing.assert_array_equal(np.frombuffer(run.token_ids, "<i4"), numbers)
    np.testing.assert_array_equal(np.frombuffer(run.logprobs, "<f4"), -numbers)
    if start is None:
        assert run.rows is None
    else:
        assert run.rows.shape == (len(steps), *ROW_SHAPE)
        np.testing.assert_array_equal(run.rows[:, 0, 0], numbers % 251)
        assert run.start == start


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 99), min_size=1), st.sets(st.integers(0, 99), max_size=3)), max_size=40),
    st.booleans(),
)
def test_each_run_equals_a_plain_list_of_its_tokens(script: list[tuple[set[int], set[int]]], has_rows: bool) -> None:
    """Each run equals a plain list of its tokens, whichever requests share steps and are popped."""
    gathering, expected, made = TokenBatcher(), dict[str, list[int]](), dict.fromkeys(NAMES, 10)
    for step, (present, popped) in enumerate(script):
        keys = [NAMES[i] for i in present]
        full = add(gathering, batch_of(keys, step, made if has_rows else None), 7)
        for key in keys:
            expected.setdefault(key, []).append(step)
            made[key] += 1
        assert full == []
        for key in [NAMES[i] for i in popped]:
            run, steps = gathering.pop(key), expected.pop(key, [])
            if steps:
                check(run, key, steps, made[key] - len(steps) if has_rows else None)
            else:
                assert run is None
    assert (sorted(gathering.keys), len(gathering)) == (sorted(expected), len(expected))
    for key, steps in expected.items():
        check(gathering.pop(key), key, steps, made[key] - len(steps) if has_rows else None)


def test_a_request_is_reported_when_its_run_is_full() -> None:
    """A request is reported when its run has no room for another token. The run is still a small chunk."""
    gathering = TokenBatcher()
    full: list[str] = []
    for step in range(MAX_RUN_TOKENS):
        assert full == []
        full = add(gathering, batch_of(["r1"], step), 0)
    assert full == ["r1"]

    wide = TokenBatch(
        keys=["r2"],
        token_ids=np.zeros(1, np.int32),
        routed_experts=np.zeros((1, 61, 8), np.uint16),
        routed_experts_starts=np.zeros(1, np.int64),
    )
    gathering.clear()
    count = 1
    while not add(gathering, wide, 0):
        wide.routed_experts_starts = np.array([count])
        count += 1
    run = gathering.pop("r2")
    assert len(run.token_ids) == 4 * count
    assert run.rows.nbytes + len(run.token_ids) <= MAX_RUN_BYTES


def test_tokens_with_other_weights_rows_or_logprobs_are_not_batched_together() -> None:
    """Tokens with other weights, routed experts or logprobs are not batched together.

    The batched tokens must leave first.
    """
    gathering = TokenBatcher()
    assert gathering.takes(batch_of(["r1"], 0), 3)
    add(gathering, batch_of(["r1"], 0), 3)
    assert gathering.takes(batch_of(["r2"], 0), 3)
    assert not gathering.takes(batch_of(["r2"], 0), 4)
    assert not gathering.takes(batch_of(["r2"], 0, logprobs=False), 3)
    assert not gathering.takes(batch_of(["r2"], 0, {"r2": 0}), 3)
    assert gathering.weight_version == 3
    gathering.pop("r1")
    add(gathering, batch_of(["r2"], 0, {"r2": 0}), 4)
    assert gathering.weight_version == 4


def test_a_row_of_a_wrong_position_rejects_the_whole_batch() -> None:
    """A row of a wrong position or an array of a wrong length rejects the whole batch."""
    gathering = TokenBatcher()
    add(gathering, batch_of(["r1"], 0, {"r1": 5}), 0)
    with pytest.raises(LocalProtocolError, match="do not follow"):
        add(gathering, batch_of(["r1", "r2"], 1, {"r1": 7, "r2": 0}), 0)
    short = batch_of(["r1", "r2"], 1, {"r1": 6, "r2": 0})
    short.token_ids = short.token_ids[:1]
    with pytest.raises(LocalProtocolError, match="other lengths"):
        add(gathering, short, 0)

    assert gathering.keys == ["r1"]
    check(gathering.pop("r1"), "r1", [0], 5)


def test_later_tokens_do_not_change_a_run_that_has_left() -> None:
    """Later tokens do not change a run that has left."""
    gathering = TokenBatcher()
    add(gathering, batch_of(["r1"], 0), 0)
    run = gathering.pop("r1")
    add(gathering, batch_of(["r2"], 1), 0)
    check(run, "r1", [0], None)
    gathering.close("r2")
    gathering.close("r2")
    assert not gathering
