"""The bytes that a worker holds for clients that do not read: counted and bounded."""

import pytest

from rollbus.bus.protocol.stream import link_sender
from rollbus.schemas.errors import ErrorCode, InvalidRequest
from rollbus.schemas.limits import INITIAL_CREDIT_BYTES
from rollbus.schemas.messages import LinkMessage, RequestKey
from rollbus.schemas.presence import ClientState
from rollbus.workers.requests.links import REMEMBER_S
from tests.workers.links_support import LATE, MAX_PAYLOAD, NOW, Ear, make_links, step


def test_above_the_budget_links_of_lost_clients_are_removed_first() -> None:
    """Above the budget, links of lost clients are removed, the longest lost first, so that live clients are served."""
    links = make_links(max_held_bytes=30_000)
    ears = [Ear(links, client=name, incarnation=f"{name}1") for name in ("alice", "bob", "carol")]
    for at, ear in enumerate(ears[:2]):
        name, _ = ear.offer("r")
        links.add_steps([step(name, 3000)], NOW)
        ear.hear()
        links.expire(LATE + at)
    name, _ = ears[2].offer("r")
    links.add_steps([step(name, 3000)], NOW)
    ears[2].hear()
    links.on_presence(ears[2].presence(), LATE + 2)
    held = links.outbound.held_bytes
    links.expire(LATE + 3)

    assert held > 30_000 > links.outbound.held_bytes
    assert [link.client for link in links.outbound.links()] == ["bob", "carol"]


@pytest.mark.proves("P61")
def test_above_twice_the_budget_the_request_with_the_largest_backlog_ends() -> None:
    """A client that does not read cannot fill a worker: the largest backlog ends as `over_budget`.

    Other requests continue.
    """
    links = make_links(max_held_bytes=INITIAL_CREDIT_BYTES * 2)
    ear = Ear(links)
    large, _ = ear.offer("large")
    small, _ = ear.offer("small")
    ear.hear()
    rounds = 0
    aborted: list[str] = []
    while not aborted and rounds < 1000:
        rounds += 1
        todo = links.add_steps([step(large, 2000), step(small, 10)], NOW)
        aborted += todo.abort
        ear.hear()

    assert aborted == [large]
    assert links.outbound.held_bytes <= 4 * INITIAL_CREDIT_BYTES
    assert links.stats.over_budget == 1
    links.add_steps([step(small, end=True)], NOW)
    links.on_link_message("alice", ear.message(), NOW)
    ear.hear()
    last = ear.chunks("large")[-1]
    assert last.error.code is ErrorCode.OVER_BUDGET
    assert sum(chunk.num_tokens for chunk in ear.chunks("small")) == rounds * 10 + 1


def test_a_client_with_endless_credit_harms_only_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that grants credit without acknowledging frames gets few frames, and only its own requests end."""
    monkeypatch.setattr(link_sender, "MAX_UNACKED_BYTES", 2 * INITIAL_CREDIT_BYTES)
    links = make_links(max_held_bytes=INITIAL_CREDIT_BYTES * 2)
    greedy, other = Ear(links), Ear(links, client="bob", incarnation="b1")
    large, _ = greedy.offer("large")
    small, _ = other.offer("small")
    links.on_link_message("alice", LinkMessage(1, [], "a1", "w1", 0, 0, 1 << 60), NOW)
    aborted = []
    for _ in range(1000):
        aborted += links.add_steps([step(large, 2000), step(small)], NOW).abort
        for route in links.outbound.sendable():
            while links.next_frame(route) is not None:
                pass

    assert aborted == [large]
    assert len(links.requests) == 1
    assert links.outbound.held_bytes < 5 * INITIAL_CREDIT_BYTES


def test_the_held_bytes_equal_the_sum_over_all_links() -> None:
    """The sum that is compared with the budget always equals the bytes of all links."""
    links = make_links()
    ears = [Ear(links, client=f"c{number}", incarnation="i") for number in range(4)]
    sums = []

    def compare() -> None:
        held_bytes = sum(link.held_bytes for link in links.outbound.links())
        sums.append((links.outbound.held_bytes, held_bytes))

    names = [ear.offer("r")[0] for ear in ears]
    compare()
    for ear in ears:
        ear.hear()
        compare()
    links.add_steps([step(name, 100_000) for name in names], NOW)
    compare()
    ears[0].hear()
    compare()
    links.on_link_message("c0", ears[0].message([RequestKey("r")]), NOW)
    compare()
    links.fail([names[1]], InvalidRequest(field="f", problem="p", allowed="a"))
    compare()
    links.on_presence(ears[2].presence(ClientState.CLOSED), NOW)
    compare()
    links.expire(LATE)
    compare()
    ears[3].hear()
    links.expire(LATE + REMEMBER_S + 1)
    compare()
    links.fence("w2", NOW, max_payload=MAX_PAYLOAD)
    compare()

    assert all(counted == held_bytes for counted, held_bytes in sums)
    assert max(sums)[0] > 1_000_000
    assert sums[-1][0] == 0
