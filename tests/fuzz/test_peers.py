"""Forged messages about links, workers and clients cause an error of rollbus and use limited memory."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.client import links as client_links
from rollbus.bus.client.coordinator import AttemptCoordinator
from rollbus.bus.client.links import ClientLinks
from rollbus.bus.nats.connection import Connection
from rollbus.bus.protocol.fleet import leases
from rollbus.bus.protocol.fleet import presence as presence_table
from rollbus.bus.protocol.fleet.leases import MAX_LEASE_S
from rollbus.bus.protocol.fleet.presence import PresenceTable
from rollbus.bus.protocol.stream import link_sender
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import ErrorCode, RemoteProtocolError, RequestError
from rollbus.schemas.messages import LinkMessage, RequestKey, decode_link_message, encode
from tests.fuzz.mutations import harmed
from tests.support.fleet import presence
from tests.workers.links_support import NOW, Ear, make_links, step

FEW = 5
REFUSAL = RequestError(code=ErrorCode.INVALID_REQUEST, message="wrong")

said = st.builds(
    LinkMessage,
    st.just(1),
    st.lists(st.builds(RequestKey, st.sampled_from(["r0", "r1", "other"]), st.integers(0, 1)), max_size=3),
    st.sampled_from(["a1", "a0", ""]),
    st.sampled_from(["w1", "w0", ""]),
    st.integers(0, 2),
    st.integers(0, 8) | st.just(2**53),
    st.integers(0, 10_000) | st.just(2**62),
    st.booleans(),
)


@pytest.mark.proves("P11")
@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["alice", "bob"]), said | harmed(said.map(encode))), max_size=12))
def test_messages_about_any_link_do_not_affect_other_clients(messages: list[tuple[str, LinkMessage | bytes]]) -> None:
    """After any messages about any link, requests of other clients continue, and buffered bytes stay limited."""
    links = make_links()
    alice, carol = Ear(links), Ear(links, client="carol", incarnation="c1")
    names = [alice.offer(f"r{i}")[0] for i in range(2)]
    hers = carol.offer("hers")[0]
    for client, item in messages:
        links.add_steps([step(name) for name in names if name in links.requests.names] + [step(hers)], NOW)
        links.flush()
        try:
            message = item if isinstance(item, LinkMessage) else decode_link_message(item)
            links.on_link_message(client, message, NOW)
        except RemoteProtocolError:
            continue
    links.expire(NOW)

    assert hers in links.requests.names
    assert links.outbound.held_bytes < 10_000
    # One link for each client that could send messages, and for the incarnations in forged messages.
    assert len(list(links.outbound.links())) <= 4


def test_unacknowledged_rejections_break_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends invalid requests and acknowledges nothing loses its link with all buffered data."""
    monkeypatch.setattr(link_sender, "MAX_UNACKED_BYTES", 10_000)
    links = make_links()
    ear = Ear(links)
    most = 0
    for i in range(1000):
        links.reject(ear.origin(f"r{i}"), REFUSAL, NOW)
        ear.hear()
        most = max(most, links.outbound.held_bytes)
        links.expire(NOW)

    assert links.stats.links_broken > 0
    assert most < 21_000
    assert links.outbound.held_bytes < 21_000


def test_links_to_invented_incarnations_end() -> None:
    """A client whose direct requests name ever new incarnations leaves no links: those without a lease end, too."""
    links = make_links()
    for i in range(1000):
        links.reject(Ear(links, incarnation=f"i{i}").origin("r"), REFUSAL, NOW)
    links.expire(NOW)
    lost = [link.lost_at for link in links.outbound.links()]
    links.expire(NOW + 1000.0)
    links.expire(NOW + 2000.0)

    assert lost.count(None) == leases.MAX_INCARNATIONS
    assert not list(links.outbound.links())


def test_a_client_ignores_new_workers_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit, the client ignores new workers.

    Known workers stay until their leases end, which have a maximum.
    """
    monkeypatch.setattr(presence_table, "MAX_WORKERS", FEW)
    view = PresenceTable()
    for i in range(100):
        view.update(presence(worker=f"w{i}", lease_s=1e300), 0.0)
    view.update(replace(presence(worker="w0"), in_flight=3, lease_s=1e300), 0.0)

    assert [worker.worker for worker in view.workers()] == [f"w{i}" for i in range(FEW)]
    assert view.workers()[0].in_flight == 3
    assert len(view.expire(MAX_LEASE_S + 2)) == FEW


def test_the_aborts_for_endless_offers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client stores a limited number of aborts for each worker that sends endless offers."""
    monkeypatch.setattr(client_links, "MAX_ABORTS", FEW)
    links = ClientLinks(cast(Connection, None), Subjects("f"), ("c", "c1"), cast(AttemptCoordinator, None))
    for i in range(100):
        links.abort("hostile", RequestKey(f"r{i}"))
    links.abort("other", RequestKey("r"))

    assert {worker: len(keys) for worker, keys in links._aborts.items()} == {"hostile": FEW, "other": 1}
