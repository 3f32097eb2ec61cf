"""Invalid commands, acks and desired states: each has one defined outcome."""

from typing import Any

import msgspec
import pytest

from rollbus.schemas import limits
from rollbus.schemas.acks import AckStatus
from rollbus.schemas.control import DesiredState, Pause, Resume, UpdateWeights
from rollbus.schemas.errors import ControlCode, InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import command_id_of, decode_ack, decode_command, decode_desired, encode_json
from rollbus.schemas.weights import WeightSource

DEEP = 100_000
ACK = {"id": "x", "command": "pause", "worker": "w", "incarnation": "i", "model": "m", "status": "applied"}
TIMELINE = {"request_id": "r", "client": "c"}


def pack(**fields: object) -> bytes:
    """Return these fields as JSON."""
    return msgspec.json.encode(fields)


def refused(**fields: Any) -> InvalidRequest:
    """Return the error of a command with these fields."""
    with pytest.raises(InvalidRequest) as caught:
        decode_command(pack(**fields))
    return caught.value


def test_a_field_that_is_missing_is_named() -> None:
    """The error names a missing field, also in a nested struct."""
    source = {"path": "/a"}
    for fields, field in (
        ({"source": source}, "version"),
        ({"version": 1, "source": source, "expected_canary": {"token_ids": []}}, "expected_canary.logprobs"),
    ):
        error = refused(command="update_weights", id="x", **fields)
        assert (error.field, error.problem) == (field, "is missing")


@pytest.mark.parametrize("name", ["paus", "", None, 5, ["pause"], {"a": 1}])
def test_an_unknown_command_is_refused(name: object) -> None:
    """An unknown command name is rejected."""
    assert refused(command=name, id="x").field == "command"


def test_a_command_without_a_name_is_refused() -> None:
    """A map without a command name is rejected."""
    assert "command" in str(refused(id="x"))


@pytest.mark.parametrize("command_id", ["", "a b", "a.b", "*", "ü", "x" * 129, 5, None])
def test_a_command_needs_an_id(command_id: object) -> None:
    """A command needs a valid id, because acks are matched by it. Without an id, each worker would invent one."""
    assert "id" in str(refused(command="pause", id=command_id))
    assert command_id_of(pack(command="pause", id=command_id)) is None
    assert (refused(command="pause").field, refused(command="pause").problem) == ("id", "is missing")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"workers": []}, "workers is empty"),
        ({"workers": ["a.b"]}, "workers is 'a.b'"),
        ({"workers": "w"}, "array"),
        ({"model": ""}, "model is ''"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": -1}, "timeout_s is -1"),
        ({"timeout_s": limits.MAX_TIMEOUT_S + 1}, "timeout_s is"),
        ({"timeout_s": "60"}, "float"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": 2**53 + 1}, "epoch is"),
        ({"mode": "now"}, "now"),
        ({"v": 2}, "2"),
        ({"clear_cache": "yes"}, "bool"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], text: str) -> None:
    """The error of an invalid command contains the field and the problem."""
    assert text in str(refused(command="pause", id="x", **fields))


@pytest.mark.parametrize("source", [{}, {"path": "/a", "objects": "b/c"}, {"path": None}])
def test_a_weight_source_is_either_a_path_or_objects(source: dict[str, object]) -> None:
    """A weight source is either a path or objects."""
    error = refused(command="update_weights", id="x", version=1, source=source)

    assert (error.field, error.allowed) == ("source", "exactly one of them")


@pytest.mark.parametrize("version", [-1, 2**31, None, "7", 1.5])
def test_a_version_that_no_chunk_can_contain_is_refused(version: object) -> None:
    """A version that no chunk can contain is rejected."""
    assert "version" in str(refused(command="update_weights", id="x", version=version, source={"path": "/a"}))


def test_at_least_one_request_and_not_too_many_can_be_aborted() -> None:
    """An abort without requests, or with more requests than a worker can have, is rejected."""
    assert "request_ids" in str(refused(command="abort", id="x", request_ids=[]))
    many = ["r"] * (limits.MAX_CHUNKS_PER_FRAME + 1)
    assert "65536" in str(refused(command="abort", id="x", request_ids=many))


def test_the_id_of_an_otherwise_invalid_command_can_be_read() -> None:
    """The id of an otherwise invalid command can be read, so that its sender can receive the error."""
    assert command_id_of(pack(command="paus", id="x", what=[1])) == "x"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker", "a.b"),
        ("worker", ""),
        ("id", ""),
        ("epoch", -1),
        ("weight_version", -1),
        ("weight_version", 2**31),
        ("in_flight", -1),
        ("v", 2),
        ("stage", "x" * 1000),
        ("incarnation", "x" * 1000),
        ("frames", {str(i): i for i in range(limits.MAX_CHUNKS_PER_FRAME + 1)}),
        ("canary", {"token_ids": [1] * 1025, "logprobs": []}),
        ("canary", {"token_ids": [-1], "logprobs": [0]}),
        ("canary", {"token_ids": [1], "logprobs": [0], "shape": [1, 2]}),
        ("timelines", [TIMELINE | {"events": [{"at": -1, "event": "offered"}]}]),
        ("timelines", [TIMELINE | {"events": [{"at": limits.MAX_UNIX_S + 1, "event": "offered"}]}]),
    ],
)
def test_an_ack_with_invalid_names_or_numbers_is_refused(field: str, value: object) -> None:
    """Names and numbers of an ack are validated before it becomes part of a command result."""
    with pytest.raises(RemoteProtocolError, match="ack"):
        decode_ack(pack(**(ACK | {field: value})))


@pytest.mark.proves("P90")
def test_unknown_statuses_and_codes_of_newer_workers_are_decoded() -> None:
    """An ack with an unknown status or code is decoded, and an unknown status is not final."""
    ack = decode_ack(pack(**ACK | {"status": "pondered", "error": {"code": "moon_phase", "message": "x"}, "more": 1}))

    assert ack.status is AckStatus.UNKNOWN
    assert not ack.status.is_final
    assert ack.error.code is ControlCode.UNKNOWN


def test_an_invalid_value_in_the_bucket_is_no_desired_state() -> None:
    """An invalid value in the bucket does not decode as a desired state."""
    good = msgspec.json.decode(encode_json(DesiredState(model="m")))
    wrong: list[dict[str, object]] = [
        {"model": ""},
        {"v": 2},
        {"epoch": -1},
        {"registers": {"pause": {"epoch": 1, "command": {"command": "paus", "id": "x"}}}},
        {"workers": {"w": []}},
        {"seen": [["x"]]},
        {"seen": [["x", 1]] * (limits.MAX_SEEN_COMMANDS + 1)},
    ]
    for fields in wrong:
        with pytest.raises(RemoteProtocolError, match="desired state"):
            decode_desired(pack(**(good | fields)))
    assert decode_desired(pack(**(good | {"added": "later"}))) == DesiredState(model="m")


def test_each_command_sets_its_register_and_one_off_commands_set_none() -> None:
    """Pause and resume set one register, an update another, and each adapter its own. One-off commands set none."""
    commands = [
        Pause(id="a"),
        Resume(id="b"),
        UpdateWeights(id="c", version=1, source=WeightSource(path="/a")),
        decode_command(pack(command="load_lora", id="d", name="x:y", source={"objects": "b/c"})),
        decode_command(pack(command="unload_lora", id="e", name="x:y")),
        decode_command(pack(command="fence", id="f")),
    ]

    assert [command.register for command in commands] == ["pause", "pause", "weights", "lora:x:y", "lora:x:y", None]
