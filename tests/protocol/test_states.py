"""The transition tables: each state is reachable and can end, and no transition leaves a final state."""

import enum
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.nats.client import MAX_LEARNED_SERVERS, parse_info
from rollbus.bus.nats.transport import (
    BUFFER_BYTES,
    OWN_BUFFER_BYTES,
    OperationReader,
    SubscriptionMessage,
    parse_headers,
)
from rollbus.bus.protocol.attempt.machine import REQUEST, RequestEvent, RequestState
from rollbus.bus.protocol.groups import GROUP, GroupEvent, GroupState
from rollbus.bus.protocol.states import (
    WORKER,
    WORKER_REQUEST,
    StateMachine,
    WorkerEvent,
    WorkerRequestEvent,
    WorkerRequestState,
)
from rollbus.schemas.errors import LocalProtocolError, RemoteProtocolError
from rollbus.schemas.presence import WorkerState
from tests.protocol.protocol_doc import DOC, PART, names_of_parts, with_parts

AnyMachine = StateMachine[enum.StrEnum, enum.StrEnum]
TABLES = [
    pytest.param(REQUEST, set(RequestState), set(RequestEvent), id="request"),
    pytest.param(WORKER_REQUEST, set(WorkerRequestState), set(WorkerRequestEvent), id="held"),
    pytest.param(GROUP, set(GroupState), set(GroupEvent), id="group"),
    pytest.param(WORKER, set(WorkerState) - {WorkerState.UNKNOWN}, set(WorkerEvent), id="worker"),
]
each_table = pytest.mark.parametrize(("machine", "states", "events"), TABLES)


def reachable(machine: AnyMachine, first: enum.StrEnum) -> set[enum.StrEnum]:
    """Return the states that are reachable from `first`, including `first`."""
    found = {first}
    while more := {after for (state, _), after in machine.transitions.items() if state in found} - found:
        found |= more
    return found


@each_table
def test_every_state_is_reachable(machine: AnyMachine, states: set[enum.StrEnum], events: set[enum.StrEnum]) -> None:
    """Each state is reachable from the initial state, and each event occurs in a transition."""
    assert reachable(machine, machine.initial) == states
    assert {event for _, event in machine.transitions} == events


@pytest.mark.proves("P1")
@each_table
def test_every_state_has_an_event_that_leads_to_a_final_state(
    machine: AnyMachine, states: set[enum.StrEnum], events: set[enum.StrEnum]
) -> None:
    """Each state has an event that leads to a final state, so nothing waits forever."""
    for state in states - machine.final:
        assert any(machine.transitions.get((state, event)) in machine.final for event in events)


@pytest.mark.proves("P1")
@each_table
def test_a_final_state_has_no_transitions(
    machine: AnyMachine, states: set[enum.StrEnum], events: set[enum.StrEnum]
) -> None:
    """A final state accepts no event."""
    assert machine.final
    assert not {state for state, _ in machine.transitions} & machine.final


@each_table
def test_a_state_and_event_without_a_transition_raise_an_error(
    machine: AnyMachine, states: set[enum.StrEnum], events: set[enum.StrEnum]
) -> None:
    """A pair of state and event has the transition of the table, or raises an error that names the pair."""
    for state, event in itertools.product(states, events):
        if (state, event) in machine.transitions:
            assert machine.next(state, event) is machine.transitions[state, event]
        else:
            with pytest.raises(
                LocalProtocolError, match=f"event {event} is invalid for a {machine.name} in state {state}"
            ):
                machine.next(state, event)


# The subjects, states and diagrams in docs/protocol.md equal the code.


def test_the_generated_parts_of_the_document_equal_the_code() -> None:
    """The generated parts of the document equal the code. `python -m tests.protocol.protocol_doc` writes them."""
    text = DOC.read_text()

    assert text == with_parts(text)


def test_the_document_contains_each_machine_exactly_once() -> None:
    """The document contains the states and the diagram of each machine exactly once."""
    assert sorted(match[1] for match in PART.finditer(DOC.read_text())) == sorted(names_of_parts())


# The INFO message of a NATS server, or of an attacker on the connection.


@pytest.mark.parametrize(
    "info",
    [[], None, {"nonce": 7}, {"max_payload": "1"}, {"max_payload": 0}, {"connect_urls": [7]}, {"tls_required": "no"}],
)
def test_fields_of_a_wrong_type_are_refused(info: Any) -> None:
    """A field of a wrong type is rejected, because nats-py would fail later or misinterpret it."""
    with pytest.raises(RemoteProtocolError, match="INFO that cannot be used"):
        parse_info(info)


def test_unknown_fields_of_a_newer_server_are_ignored() -> None:
    """Unknown fields of a newer server are ignored."""
    assert parse_info({"version": "3", "new": {"x": 1}, "connect_urls": None}).learned_servers == []


def test_only_valid_addresses_are_learned() -> None:
    """Only valid addresses of host and port are learned, also for IPv6."""
    good = ["a.example:4222", "10.0.0.1:1", "[2001:db8::1]:65535"]
    bad = ["a", "a:", "a:x", "a:0", "a:65536", "[::1", "u:p@a:1", "a b:1", "a:1/x", "tls://a:1", ""]
    assert parse_info({"connect_urls": bad + good}).learned_servers == good


def test_the_number_of_learned_addresses_is_bounded() -> None:
    """The number of learned addresses is bounded, because each address costs a connection attempt."""
    urls = [f"h{i}:1" for i in range(1000)]
    assert parse_info({"connect_urls": urls}).learned_servers == urls[:MAX_LEARNED_SERVERS]


@pytest.mark.parametrize(
    ("info", "offers"), [({}, False), ({"tls_required": True}, True), ({"tls_available": True}, True)]
)
def test_a_server_that_requires_or_supports_tls_offers_tls(info: dict[str, bool], offers: bool) -> None:
    """A server offers TLS if it requires TLS or has it available."""
    assert parse_info(info).offers_tls is offers


# The reader splits NATS's protocol into operations, however the bytes arrive.


def written(operation: SubscriptionMessage | bytes) -> bytes:
    """Return an operation in the server's format."""
    if isinstance(operation, bytes):
        return operation
    sid, subject, reply, headers, payload = operation
    words = [b"MSG" if headers is None else b"HMSG", subject, str(sid).encode()]
    words += [reply] if reply else []
    words += [] if headers is None else [str(len(headers)).encode()]
    words += [str(len(headers or b"") + len(payload)).encode()]
    return b" ".join(words) + b"\r\n" + (headers or b"") + bytes(payload) + b"\r\n"


def read(stream: bytes, sizes: list[int]) -> list[SubscriptionMessage | bytes]:
    """Return the operations of `stream`, received in pieces of at most these sizes in turn."""
    found: list[SubscriptionMessage | bytes] = []
    reader, at, turn = OperationReader(), 0, 0
    while at < len(stream):
        buffer = reader.buffer()
        assert len(buffer)
        piece = stream[at : at + min(sizes[turn % len(sizes)], len(buffer))]
        buffer[: len(piece)] = piece
        reader.received(len(piece))
        assert len(piece)
        at, turn = at + len(piece), turn + 1
        found += reader.pop_operations()
        assert reader.unread_bytes == 0
    return found


Drawn = bytes | tuple[int, bytes, bytes, bytes | None, int, bytes]
WORDS = st.text("abc.$_0", min_size=1, max_size=40).map(str.encode)
SIZES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([OWN_BUFFER_BYTES - 2, OWN_BUFFER_BYTES - 1, OWN_BUFFER_BYTES, BUFFER_BYTES - 40, BUFFER_BYTES]),
    st.integers(0, 3 * BUFFER_BYTES),
)
TEXTS = st.sampled_from([b"\r\n", b"xyz", b"MSG a 1 1\r\n"])
HEADERS = st.none() | st.integers(0, 3).map(lambda count: b"NATS/1.0\r\n" + b"k: v\r\n" * count + b"\r\n")
# The payload is drawn as size and text, because hypothesis prints the values that it tries.
DELIVERIES = st.tuples(st.integers(1, 2**40), WORDS, st.just(b"") | WORDS, HEADERS, SIZES, TEXTS)
LINES = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'no'\r\n", b'INFO {"a":1}\r\n'])


@given(drawn=st.lists(DELIVERIES | LINES, max_size=12), sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=5))
def test_operations_are_read_in_order_wherever_the_stream_is_split(drawn: list[Drawn], sizes: list[int]) -> None:
    """All operations are read in order, wherever the stream is split."""
    operations = [
        one if isinstance(one, bytes) else SubscriptionMessage(*one[:4], one[5] * (one[4] // len(one[5])))
        for one in drawn
    ]
    data = b"".join(map(written, operations))
    assert read(data, sizes) == operations
    if len(data) < 1000:
        assert read(data, [1]) == operations


def test_a_large_message_is_received_in_place() -> None:
    """After the line of a large message, the socket writes directly into its payload."""
    reader = OperationReader()
    head = b"MSG a 1 1000000\r\n"
    reader.buffer()[: len(head)] = head
    reader.received(len(head))
    buffer = reader.buffer()
    assert len(buffer) == 1_000_000
    buffer[:] = b"x" * 1_000_000
    reader.received(len(buffer))
    del buffer
    (found,) = reader.pop_operations()
    assert isinstance(found, SubscriptionMessage)
    assert found.payload == b"x" * 1_000_000
    assert len(reader.buffer()) == BUFFER_BYTES


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"NATS/1.0\r\na: b\r\nC:d\r\n\r\n", {"a": "b", "C": "d"}),
        (b"NATS/1.0 404\r\n\r\n", {"Status": "404"}),
        (b"NATS/1.0 404 No Messages\r\n\r\n", {"Status": "404", "Description": "No Messages"}),
        (b"NATS/1.0 100 Idle Heartbeat\r\nA: 1\r\n\r\n", {"Status": "100", "Description": "Idle Heartbeat", "A": "1"}),
        (b"NATS/1.0\r\nno colon\r\na: \xff\r\n\r\n", {"a": "\ufffd"}),
        (b"", {}),
    ],
)
def test_headers_and_the_status_line_are_parsed(block: bytes, headers: dict[str, str]) -> None:
    """Headers and the words of the status line are parsed, and a line without a colon is ignored."""
    assert parse_headers(block) == headers


def test_complete_operations_count_as_unread_until_the_caller_pops_them() -> None:
    """Complete operations count as unread until the caller pops them, because the caller may be delayed."""
    reader = OperationReader()
    stream = written(SubscriptionMessage(1, b"a", b"", None, b"x" * 100)) + b"PING\r\nPON"
    reader.buffer()[: len(stream)] = stream
    reader.received(len(stream))
    assert 106 < reader.unread_bytes < 1000
    assert len(list(reader.pop_operations())) == 2
    assert reader.unread_bytes == 0
    assert list(reader.pop_operations()) == []


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"MSG a 1\r\n", "values to unpack"),
        (b"MSG a b c d 5\r\n", "words"),
        (b"MSG a x 5\r\n", "invalid literal"),
        (b"MSG a 1 -5\r\n", "-5"),
        (b"MSG a 1 100000000\r\n", "100000000"),
        (b"HMSG a 1 5\r\n", "pop"),
        (b"HMSG a 1 9 5\r\n", "9 bytes of headers in 5"),
        (b"MSG a 1 2\r\nabcd", "does not end"),
        (b"MSG a 1 20000\r\n" + b"x" * 20_002, "does not end"),
        (b"x" * BUFFER_BYTES, "line of more than"),
    ],
)
def test_invalid_bytes_raise_an_error_that_describes_the_fault(stream: bytes, words: str) -> None:
    """Invalid bytes raise an error that describes the fault."""
    with pytest.raises(RemoteProtocolError, match=words):
        read(stream, [1000])
