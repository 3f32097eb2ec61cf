"""Invalid commands, acks and desired states: each has one defined outcome."""

import hashlib
from typing import Any

import msgspec
import pytest

from rollbus.schemas import limits
from rollbus.schemas.acks import AckStatus
from rollbus.schemas.control import DesiredState, Pause, Resume, UpdateWeights
from rollbus.schemas.errors import ControlCode, InvalidRequest, RemoteProtocolError
from rollbus.schemas.manifest import (
    MANIFEST,
    MAX_LINKS,
    Link,
    Manifest,
    TensorDelta,
    TensorEntry,
    content_digest,
    decode_manifest,
    delta_name,
)
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
    assert command_id_of(b'{"id":"x","command":1e999}') == "x"


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


# Manifests that contradict themselves, name a path outside the folder or are too large do not decode.


SHA = hashlib.sha256(b"").hexdigest()


def tensor(name: str = "a", file: str = "model.safetensors", **fields: Any) -> TensorEntry:
    """Return the description of a small tensor."""
    return TensorEntry(**{"name": name, "dtype": "BF16", "shape": (2, 3), "sha256": SHA, "file": file} | fields)


def manifest(*tensors: TensorEntry) -> dict[str, Any]:
    """Return a valid manifest as decoded JSON."""
    tensors = tensors or (tensor("a"), tensor("b", delta=TensorDelta(encoding="sparse", num_bytes=4, body_bytes=4)))
    files = {"config.json": SHA}
    digest = content_digest(tensors, files)
    made = Manifest(
        model="m",
        version=3,
        digest=digest,
        epoch=1,
        publisher="p",
        tensors=tensors,
        files=files,
        links=(
            Link(objects="b/2", version=2, digest=SHA, anchor_bytes=7),
            Link(objects="b/3", version=3, digest=digest, delta_bytes=4),
        ),
    )
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))
    return decoded


def with_digest(made: dict[str, Any]) -> dict[str, Any]:
    """Set the digest of a changed manifest to that of its content."""
    tensors = msgspec.convert(made["tensors"], list[TensorEntry])
    digest = content_digest(tensors, made["files"])
    made["digest"] = made["links"][-1]["digest"] = digest
    return made


def test_a_manifest_decodes_to_the_encoded_values() -> None:
    """A manifest decodes to the encoded values, and fields of a newer publisher are ignored."""
    made = manifest()
    decoded = decode_manifest(msgspec.json.encode(made | {"more": 1}))

    assert msgspec.json.decode(msgspec.json.encode(decoded)) == made
    assert decoded.own.objects == "b/3"
    assert [entry.size for entry in decoded.tensors] == [12, 12]
    assert [entry.item_bytes for entry in decoded.tensors] == [2, 2]


def test_the_digest_depends_only_on_the_content() -> None:
    """The digest depends only on the content: name, order, file, shape and hash.

    Delta, publisher and chain do not change it.
    """
    plain = (tensor("a"), tensor("b"))
    digest = content_digest(plain, {})

    changed = TensorDelta(encoding="dense", num_bytes=1, body_bytes=1)
    assert content_digest((tensor("a", delta=changed), tensor("b")), {}) == digest
    others = [
        content_digest((tensor("b"), tensor("a")), {}),
        content_digest((tensor("a"), tensor("c")), {}),
        content_digest((tensor("a"), tensor("b", "other.safetensors")), {}),
        content_digest((tensor("a"), tensor("b", shape=(3, 2))), {}),
        content_digest((tensor("a"), tensor("b", sha256=SHA[::-1])), {}),
        content_digest(plain, {"config.json": SHA}),
    ]
    assert len({digest, *others}) == 7


def refusal_of(made: dict[str, Any]) -> str:
    """Return why a manifest does not decode."""
    with pytest.raises(RemoteProtocolError, match="a manifest does not decode") as raised:
        decode_manifest(msgspec.json.encode(made))
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v": 2}, "v"),
        ({"digest": SHA}, "last link"),
        ({"version": 4}, "last link"),
        ({"links": []}, "length"),
        ({"tensors": []}, "length"),
        ({"epoch": -1}, "epoch"),
        ({"files": {"../x": SHA}}, "regex"),
        ({"files": {".hidden": SHA}}, "regex"),
        ({"files": {"a/b": SHA}}, "regex"),
        ({"files": {"config.json": "x"}}, "regex"),
        ({"model": ""}, "model"),
        ({"files": {"config.json": SHA[::-1]}}, "digest of the manifest does not match its content"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, Any], said: str) -> None:
    """A manifest with paths in names, another version, other content or no content is rejected."""
    assert said in refusal_of(manifest() | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "F33"}, "unknown dtype"),
        ({"name": "__metadata__"}, "which safetensors reserves"),
        ({"dtype": "F4", "shape": [3]}, "is not a whole number of bytes"),
        ({"shape": [-1]}, ">= 0"),
        ({"shape": [2**63]}, "shape"),
        ({"shape": [1] * 17}, "length"),
        ({"file": "../model.safetensors"}, "regex"),
        ({"file": "/model.safetensors"}, "regex"),
        ({"name": ""}, "length"),
        ({"delta": {"encoding": "other", "num_bytes": 1, "body_bytes": 1}}, "encoding"),
        ({"delta": {"encoding": "dense", "num_bytes": -1, "body_bytes": 1}}, "num_bytes"),
        ({"delta": {"encoding": "dense", "num_bytes": 1, "body_bytes": 1, "object": 4096}}, "object"),
    ],
)
def test_an_impossible_tensor_is_refused(change: dict[str, Any], said: str) -> None:
    """An impossible tensor is rejected before its size is used."""
    made = manifest()
    made["tensors"][0] |= change

    assert said in refusal_of(made)


def test_tensors_and_files_have_unique_names() -> None:
    """Tensors and files have unique names, and tensors are in the order of their files."""
    assert "a tensor twice" in refusal_of(with_digest(manifest() | {"tensors": [manifest()["tensors"][0]] * 2}))
    for files in (["b.safetensors", "a.safetensors"], ["config.json"] * 2, [MANIFEST] * 2):
        made = manifest()
        for entry, file in zip(made["tensors"], files, strict=True):
            entry["file"] = file
        if MANIFEST in files:
            made["files"] = {MANIFEST: SHA}
        assert "not in the order of their files, or a file is listed twice" in refusal_of(with_digest(made))


def test_a_chain_with_more_links_than_allowed_is_refused() -> None:
    """A chain with more links than allowed is rejected."""
    made = manifest()
    made["links"] = [made["links"][0]] * MAX_LINKS + [made["links"][-1]]

    assert "length" in refusal_of(made)


def test_delta_objects_are_numbered() -> None:
    """Delta objects have numbers, so that their names sort in order."""
    assert [delta_name(number) for number in (0, 12)] == ["delta-0000", "delta-0012"]
