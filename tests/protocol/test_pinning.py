"""Pins a version to the digest that workers found."""

import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.authority import pin, unpinned, without
from rollbus.bus.protocol.fleet.desired import check_recordable, other_digests, record
from rollbus.schemas.acks import Ack
from rollbus.schemas.control import DesiredState, LoadLora, UpdateWeights
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.weights import WeightSource
from tests.support import fleet
from tests.support.fleet import capabilities, presence

A, B = "a" * 64, "b" * 64
UPDATE = UpdateWeights(id="u", source=WeightSource(path="/ckpt/latest"), version=2)


def ack(worker: str, digest: str | None = A, path: str | None = "/ckpt/2") -> Ack:
    """Return the ack of a check."""
    return fleet.ack(command="check_weights", worker=worker, digest=digest, path=path)


def staged(*acks: Ack) -> dict[str, Ack]:
    """Return acks by worker."""
    return {each.worker: each for each in acks}


def test_equal_digests_and_real_paths_are_recorded() -> None:
    """If all workers found one content and one real path, both are recorded; else the path stays."""
    pinned, warnings = pin(UPDATE, staged(ack("a"), ack("b")), ())
    assert (pinned.digest, pinned.source.path, warnings) == (A, "/ckpt/2", ())
    pinned, warnings = pin(UPDATE, staged(ack("a"), ack("b", path="/other/2")), ())
    assert (pinned.digest, pinned.source.path, warnings) == (A, "/ckpt/latest", ())


def test_different_digests_are_refused_with_their_workers() -> None:
    """The error names each group of workers, and so it does for a digest of the command itself."""
    with pytest.raises(ControlError, match=f"{A} on a, c; {B} on b") as raised:
        pin(UPDATE, staged(ack("a"), ack("b", B), ack("c")), ())
    assert raised.value.code is ControlCode.OTHER_CONTENT
    with pytest.raises(ControlError, match=f"{A} on a; {B} on the command"):
        pin(replace(UPDATE, digest=B), staged(ack("a")), ())


@pytest.mark.parametrize(("acks", "unable"), [((ack("a"), ack("old", None, None)), ()), ((ack("a"),), ("old",))])
def test_one_worker_without_is_enough_for_an_unpinned_version(acks: tuple[Ack, ...], unable: tuple[str, ...]) -> None:
    """The digest is then left out, also for workers that would understand it, and a warning names the worker."""
    pinned, [warning] = pin(UPDATE, staged(*acks), unable)
    assert pinned.digest is None
    assert warning.startswith("version 2 is unpinned: old cannot compare digests")


def test_a_version_whose_source_no_worker_has_read_is_unpinned() -> None:
    """A warning says so, also if the command is recorded anyway, as that of an adapter."""
    pinned, [warning] = pin(UPDATE, {}, ())
    assert pinned.digest is None
    assert warning == "version 2 is unpinned: no worker has read its source yet"


def test_only_present_workers_of_the_model_count() -> None:
    """Starting workers have no capabilities yet; workers of other models have another desired state."""
    able, old = replace(capabilities(), weight_digests=True), replace(capabilities(), weight_digests=False)
    workers = (
        replace(presence(), worker="a", capabilities=able, model="m"),
        replace(presence(), worker="b", capabilities=old, model="m"),
        replace(presence(), worker="c", capabilities=None, model="m"),
        replace(presence(), worker="d", capabilities=old, model="n"),
    )
    assert without("weight_digests", workers, "m") == ("b",)


def test_a_version_is_its_digest_where_both_are_known() -> None:
    """The same number with the same digest is recorded again from another path; with another digest it is refused."""
    state, _ = record(DesiredState(model="m"), replace(UPDATE, digest=A))
    elsewhere = replace(UPDATE, id="v", source=WeightSource(path="/copy"))
    assert record(state, replace(elsewhere, digest=A))[1] == 2
    with pytest.raises(ControlError, match=f"is recorded already, from /ckpt/latest with the digest {A}") as raised:
        record(state, replace(UPDATE, id="w", digest=B))
    assert raised.value.code is ControlCode.OLD_VERSION
    check_recordable(state, elsewhere)
    with pytest.raises(ControlError, match="is recorded already"):
        check_recordable(state, replace(elsewhere, source=WeightSource(objects="bucket/2")))
    assert other_digests(state, replace(UPDATE, digest=B)) == {A}
    assert not other_digests(state, replace(UPDATE, digest=A))


def test_versions_without_a_digest_are_named() -> None:
    """Both weights and adapters are named once, also if single workers have commands of their own."""
    state, _ = record(DesiredState(model="m"), UPDATE)
    state, _ = record(state, LoadLora(name="a", source=WeightSource(path="/a"), version=1, workers=("w",)))
    assert unpinned(state) == [
        "version 1 of adapter a is unpinned: no load can prove its content",
        "version 2 of m is unpinned: no load can prove its content",
    ]
    assert not unpinned(record(DesiredState(model="m"), replace(UPDATE, digest=A))[0])
