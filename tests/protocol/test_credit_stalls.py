"""The count of credit stalls of a link, by which an operator recognizes a slow client."""

from rollbus.bus.protocol.stream.link_sender import LinkSender
from rollbus.schemas.limits import INITIAL_CREDIT_BYTES
from rollbus.schemas.messages import RequestKey
from tests.protocol.test_link_sender import (
    SEGMENT_BYTES,
    add_steps,
    long_prompt,
    make_keys,
    make_sender,
    receive_message,
    seal_all,
)
from tests.support.scenarios import simple


def open_request(sender: LinkSender, key: RequestKey, num_kib: int) -> None:
    """Accept a request with this many KiB to send."""
    scenario = long_prompt(num_kib)
    sender.open(key, scenario.writer(SEGMENT_BYTES, key))
    add_steps(sender, key, scenario)


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
