"""The way of batched tokens: to the links immediately, or batched for requests that are not streamed."""

import numpy as np

from rollbus.bus.protocol.stream.engine_step import TokenBatch
from rollbus.schemas.errors import ErrorCode, RequestError
from rollbus.schemas.messages import RequestKey
from tests.workers.links_support import NOW, Ear, make_links, step


def batch_of(*names: str, token: int = 5, row: int | None = None) -> TokenBatch:
    """Return one token for each request, without log probabilities, and with a row at `row` if it is given."""
    return TokenBatch(
        keys=list(names),
        token_ids=np.full(len(names), token, np.int32),
        routed_experts=None if row is None else np.full((len(names), 4, 8), token, np.uint8),
        routed_experts_starts=None if row is None else np.full(len(names), row, np.int64),
    )


def tokens(ear: Ear, request_id: str) -> list[list[int]]:
    """Return the received tokens by chunk."""
    return [chunk.token_ids.tolist() for chunk in ear.chunks(request_id) if chunk.num_tokens]


def test_streamed_tokens_leave_with_their_step_and_batched_tokens_at_the_flush() -> None:
    """Streamed tokens leave with their step, and batched tokens at the flush, also from the same engine batch.

    Tokens of an unknown request are counted as late.
    """
    links = make_links()
    ear = Ear(links)
    whole, _ = ear.offer("whole", gathers=True)
    streamed, _ = ear.offer("streamed")
    for token in (1, 2, 3):
        links.add_steps([batch_of(whole, streamed, "gone", token=token)], NOW)
        ear.hear()

    assert (tokens(ear, "streamed"), tokens(ear, "whole")) == ([[1], [2], [3]], [])
    assert (links.dispatcher.is_gathering, links.stats.late_steps, links.stats.generated_tokens) == (True, 3, 6)
    links.flush()
    ear.hear()
    assert (tokens(ear, "whole"), links.dispatcher.is_gathering) == ([[1, 2, 3]], False)


def test_the_end_of_a_request_flushes_its_batched_tokens() -> None:
    """The end of a request flushes its batched tokens before its last step, whose totals count all of them."""
    links = make_links()
    ear = Ear(links)
    name, _ = ear.offer("r", gathers=True, routing=True)
    links.add_steps([step(name, rows=(0, 2))], NOW)
    for i in range(4):
        links.add_steps([batch_of(name, row=2 + i)], NOW)
    links.add_steps([step(name, rows=(6, 7), end=True)], NOW)
    ear.hear()

    end = ear.chunks("r")[-1].end
    assert (end.num_tokens, end.num_rows, links.dispatcher.is_gathering) == (6, 7, False)


def test_tokens_keep_the_version_with_which_they_were_generated() -> None:
    """Tokens keep the version with which they were generated, also if they leave under a later version."""
    links = make_links()
    ear = Ear(links)
    name, _ = ear.offer("r", gathers=True)
    links.add_steps([batch_of(name, token=1)], NOW)
    links.versions.weight_version = 1
    links.add_steps([batch_of(name, token=2)], NOW)
    links.versions.weight_version = 2
    links.flush()
    ear.hear()

    assert [(chunk.token_ids.tolist(), chunk.weight_version) for chunk in ear.chunks("r")] == [([1], 0), ([2], 1)]


def test_batched_tokens_of_a_failed_aborted_or_fenced_request_are_discarded() -> None:
    """The batched tokens of a failed, aborted or fenced request are discarded."""
    links = make_links()
    ear = Ear(links)
    failed, _ = ear.offer("failed", gathers=True)
    unwanted, _ = ear.offer("unwanted", gathers=True)
    links.add_steps([batch_of(failed, unwanted)], NOW)
    links.fail([failed], RequestError(code=ErrorCode.TIMEOUT, message="late"))
    links.on_link_message("alice", ear.message([RequestKey("unwanted")]), NOW)
    links.flush()
    ear.hear()
    assert (tokens(ear, "failed"), tokens(ear, "unwanted"), links.dispatcher.is_gathering) == ([], [], False)

    fenced, _ = ear.offer("fenced", gathers=True)
    links.add_steps([batch_of(fenced)], NOW)
    links.fence("w2", NOW, max_payload=1_000_000)
    assert not links.dispatcher.is_gathering


def test_batched_rows_at_a_wrong_position_end_only_their_requests() -> None:
    """Rows at a wrong position end only their requests, as `protocol_error`, and the engine aborts them."""
    links = make_links()
    ear = Ear(links)
    wrong, _ = ear.offer("wrong", gathers=True, routing=True)
    right, _ = ear.offer("right", routing=True)
    links.add_steps([step(wrong, rows=(0, 2)), step(right, rows=(0, 2))], NOW)
    links.add_steps([batch_of(wrong, row=2)], NOW)
    todo = links.add_steps([batch_of(wrong, row=9)], NOW)
    links.add_steps([batch_of(right, row=2)], NOW)
    ear.hear()

    assert todo.abort == [wrong]
    assert [chunk.error.code for chunk in ear.chunks("wrong") if chunk.error] == [ErrorCode.PROTOCOL_ERROR]
    assert tokens(ear, "right") == [[7, 5]]
