"""Manifests that contradict themselves, name a path outside the folder or are too large do not decode."""

import hashlib
from typing import Any

import msgspec
import pytest

from rollbus.schemas.errors import RemoteProtocolError
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


def refused(made: dict[str, Any]) -> str:
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
    assert said in refused(manifest() | change)


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

    assert said in refused(made)


def test_tensors_and_files_have_unique_names() -> None:
    """Tensors and files have unique names, and tensors are in the order of their files."""
    assert "a tensor twice" in refused(with_digest(manifest() | {"tensors": [manifest()["tensors"][0]] * 2}))
    for files in (["b.safetensors", "a.safetensors"], ["config.json"] * 2, [MANIFEST] * 2):
        made = manifest()
        for entry, file in zip(made["tensors"], files, strict=True):
            entry["file"] = file
        if MANIFEST in files:
            made["files"] = {MANIFEST: SHA}
        assert "not in the order of their files, or a file is listed twice" in refused(with_digest(made))


def test_a_chain_with_more_links_than_allowed_is_refused() -> None:
    """A chain with more links than allowed is rejected."""
    made = manifest()
    made["links"] = [made["links"][0]] * MAX_LINKS + [made["links"][-1]]

    assert "length" in refused(made)


def test_delta_objects_are_numbered() -> None:
    """Delta objects have numbers, so that their names sort in order."""
    assert [delta_name(number) for number in (0, 12)] == ["delta-0000", "delta-0012"]
