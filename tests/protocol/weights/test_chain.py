"""The chain of published versions: lease, anchors and deltas, and the versions that a worker fetches."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.protocol.weights import chain
from rollbus.bus.protocol.weights.chain import SIGN_S, AnchorReason, Contents, FetchPlan, Silence, fetch_plans
from rollbus.schemas.errors import ControlCode, ControlError, LocalProtocolError, RemoteProtocolError
from rollbus.schemas.manifest import (
    MAX_HISTORY,
    MAX_LINKS,
    ChainRecord,
    Holder,
    Link,
    Manifest,
    TensorEntry,
    content_digest,
    decode_chain,
)

ALICE = Holder(publisher="alice", incarnation="1")
BOB = Holder(publisher="bob", incarnation="2")
TAKEN_OVER_AFTER_S = chain.LEASE_S + chain.MARGIN_S


def link(number: int, *, delta: int | None = 1, anchor: int | None = None) -> Link:
    """Return a version with its own content."""
    return Link(
        objects=f"b/versions/{number}-1-{number:08x}",
        version=number,
        digest=f"{number:064x}",
        delta_bytes=delta,
        anchor_bytes=anchor,
    )


def anchor(number: int, *, delta: int | None = None, size: int = 100) -> Link:
    """Return a version with an anchor."""
    return link(number, delta=delta, anchor=size)


def manifest(links: tuple[Link, ...], adapter: str | None = None) -> Manifest:
    """Return the manifest of the last link."""
    tensor = TensorEntry(name="t", dtype="U8", shape=(1,), sha256="0" * 64, file="model.safetensors")
    digest = content_digest([tensor], {})
    links = (*links[:-1], replace(links[-1], digest=digest))
    own = links[-1]
    return Manifest(
        model="m",
        adapter=adapter,
        version=own.version,
        digest=digest,
        epoch=1,
        publisher="a",
        tensors=(tensor,),
        links=links,
    )


def test_a_lease_is_acquired_renewed_and_released() -> None:
    """A publisher acquires a free lease immediately, and each lease has its own epoch."""
    first = chain.lease_taken(ChainRecord(model="m"), ALICE, math.inf)
    assert (first.holder, first.epoch) == (ALICE, 1)
    assert chain.lease_kept(first, ALICE, 1, 0.0) == first
    second = chain.lease_taken(replace(first, holder=None), BOB, 0.0)
    assert (second.holder, second.epoch) == (BOB, 2)
    for record, shown in ((second, "bob"), (replace(second, holder=None), "another publisher")):
        with pytest.raises(ControlError, match=rf"{shown} took over .* in epoch 2, .*\(alice, epoch 1\)") as raised:
            chain.lease_kept(record, ALICE, 1, math.inf)
        assert raised.value.code is ControlCode.PUBLISHER_BUSY


def test_epochs_of_a_lease_increase_although_the_server_lost_its_store() -> None:
    """Epochs also increase if the server loses its store.

    A publication that began before the loss cannot be committed.
    """
    empty = ChainRecord(model="m")
    with pytest.raises(ControlError, match="lost its store, and with it the lease of epoch 7") as raised:
        chain.check_lease(empty, ALICE, 7)
    assert raised.value.code is ControlCode.STORAGE
    anew = chain.lease_kept(empty, ALICE, 7, math.inf)
    assert (anew.holder, anew.epoch) == (ALICE, 8)
    # The write of the record was not confirmed, and the next read finds it.
    assert chain.lease_kept(anew, ALICE, 7, 0.0) == anew
    with pytest.raises(ControlError, match="while version 1 was being published"):
        chain.committed(anew, manifest((anchor(1),)))
    with pytest.raises(ControlError, match="bob publishes weights") as raised:
        chain.lease_kept(chain.lease_taken(empty, BOB, math.inf), ALICE, 7, 0.0)
    assert raised.value.code is ControlCode.PUBLISHER_BUSY


@pytest.mark.parametrize("holder", [BOB, replace(ALICE, incarnation="3")])
def test_a_held_lease_is_refused_until_its_expiry(holder: Holder) -> None:
    """A lease that another publisher holds is refused with its holder and age.

    After lease and margin, the epoch increases.
    """
    held = chain.lease_taken(ChainRecord(model="m", epoch=6), ALICE, math.inf)
    with pytest.raises(
        ControlError, match=r"alice publishes weights of 'm' and renewed its lease 19\.9 s ago"
    ) as raised:
        chain.lease_taken(held, holder, TAKEN_OVER_AFTER_S - 0.1)
    assert raised.value.code is ControlCode.PUBLISHER_BUSY
    taken = chain.lease_taken(held, holder, TAKEN_OVER_AFTER_S)
    assert (taken.holder, taken.epoch) == (holder, 8)


def reason(
    *links: Link, snapshot: str | None = "last", after_transfer: bool = False, workers_read_deltas: bool = True
) -> AnchorReason | None:
    """Return the reason why the next version needs an anchor, or None."""
    if snapshot == "last":
        snapshot = links[-1].digest if links else None
    return chain.needs_anchor(
        links, snapshot=snapshot, after_transfer=after_transfer, workers_read_deltas=workers_read_deltas
    )


def test_a_version_without_a_usable_chain_needs_an_anchor() -> None:
    """A version needs an anchor if it is the first, has no base or no readers of deltas, or follows a long chain."""
    start = (anchor(1), link(2))
    assert reason() is AnchorReason.FIRST
    assert reason(*start) is None
    assert reason(*start, snapshot=None) is AnchorReason.NO_SNAPSHOT
    assert reason(*start, snapshot=start[0].digest) is AnchorReason.NO_SNAPSHOT
    assert reason(*start, after_transfer=True) is AnchorReason.AFTER_TRANSFER
    assert reason(*start, workers_read_deltas=False) is AnchorReason.OLD_WORKERS
    assert reason(anchor(1), link(2, delta=50)) is None
    assert reason(anchor(1), link(2, delta=51)) is AnchorReason.CHAIN_BYTES
    assert reason(anchor(1), link(2, delta=51), anchor(3, delta=60)) is None
    chain_of = [anchor(0, size=10**6), *(link(n) for n in range(1, chain.MAX_DELTAS + 1))]
    assert reason(*chain_of[:-1]) is None
    assert reason(*chain_of) is AnchorReason.CHAIN_LENGTH
    assert reason(link(2)) is AnchorReason.FIRST


def test_a_version_with_a_base_has_a_delta_beside_its_anchor() -> None:
    """A version with a base has a delta beside its anchor.

    Without room for an anchor, deltas continue up to the hard limit.
    """
    links = (anchor(1), *(link(n) for n in range(2, MAX_LINKS + 1)))
    room = chain.needed_bytes(100)

    def contents(why: AnchorReason | None, limit: int, given: tuple[Link, ...] = links) -> Contents:
        return chain.contents(why, given, anchor_bytes=100, used=7, limit=limit)

    assert contents(None, 0) == Contents(anchor=False, delta=True)
    for why in AnchorReason:
        has_delta = not why.is_required or why is AnchorReason.OLD_WORKERS
        roomy = chain.needed_for_version(links, 100) + 7
        assert contents(why, roomy) == Contents(anchor=True, delta=has_delta)
        if why.is_required:
            with pytest.raises(ControlError, match=rf"\({why}\) takes {room} bytes, and of the bucket's") as raised:
                contents(why, room + 6)
            assert raised.value.code is ControlCode.STORAGE
        else:
            assert contents(why, room + 6, links[:-1]) == Contents(anchor=False, delta=True)
            with pytest.raises(ControlError, match=rf"of the bucket's {room + 6} bytes 7 are used"):
                contents(why, room + 6)
    assert len(chain.links_with(links[:-1], link(99))) == MAX_LINKS


@pytest.mark.parametrize("delta", [0, 1, 2 * 10**8])
def test_a_bucket_of_the_size_that_doctor_recommends_has_enough_room(delta: int) -> None:
    """A bucket of the size that `doctor` recommends has room for the longest chain, an anchor and a delta.

    A smaller bucket has room for the anchor only.
    """
    size = 10**9
    first = anchor(1, delta=delta, size=size)
    # All but the last delta are below half an anchor or below the maximum number. The last one exceeds the limit.
    count = min(chain.MAX_DELTAS, size // 2 // delta + 1) if delta else chain.MAX_DELTAS
    links = (first, *(link(number, delta=delta) for number in range(2, count + 2)))
    used = sum((one.delta_bytes or 0) + (one.anchor_bytes or 0) for one in links)
    used += used // 256
    why = reason(*links)
    assert why in {AnchorReason.CHAIN_BYTES, AnchorReason.CHAIN_LENGTH}
    limit = chain.needed_for_chain(links)
    assert chain.contents(why, links, anchor_bytes=size, used=used, limit=limit) == Contents(anchor=True, delta=True)
    tight = used + chain.needed_bytes(size)
    alone = Contents(anchor=True, delta=delta == 0)
    assert chain.contents(why, links, anchor_bytes=size, used=used, limit=tight) == alone


def test_only_folders_of_the_publishers_bucket_count_as_published() -> None:
    """Only folders of the publishers' bucket count as published."""
    assert chain.is_published("b/versions/7-1-0123abcd", "b")
    assert chain.is_published("b/adapters/x/7-1-0123abcd", "b")
    assert not chain.is_published("c/versions/7-1-0123abcd", "b")
    assert not chain.is_published("b/m/weights/7-0123abcd", "b")


def test_the_links_of_a_manifest_begin_at_the_last_anchor() -> None:
    """A manifest's links start at the last anchor before its version, so that workers can continue with deltas."""
    links = (anchor(1), link(2), anchor(3, delta=1), link(4))
    assert chain.links_with(links, link(5)) == (*links[2:], link(5))
    assert chain.links_with(links[:2], links[2]) == links[:3]
    assert chain.links_with(links, anchor(5)) == (anchor(5),)
    with pytest.raises(LocalProtocolError, match="version 5 is a delta, and there is no anchor"):
        chain.links_with((link(4),), link(5))


def test_a_commit_is_added_once_and_only_to_its_own_chain() -> None:
    """A commit is added once, and its manifest must continue the chain. An adapter does not change a chain."""
    record = ChainRecord(model="m", links=(anchor(1),))
    next_one = manifest((anchor(1), link(2)))
    after = chain.committed(record, next_one)
    assert after.links == next_one.links
    assert chain.committed(after, next_one) == after
    with pytest.raises(LocalProtocolError, match="has 1 links, which differ from the 2"):
        chain.committed(record, manifest((link(2),)))
    assert chain.committed(record, manifest((anchor(9),), adapter="lora")) == record
    with pytest.raises(LocalProtocolError):
        chain.committed(record, manifest((anchor(1), link(2)), adapter="lora"))


def test_a_history_is_bounded_without_losing_what_is_recorded() -> None:
    """The history is bounded, but the chains of recorded versions stay, regardless of later publications."""
    record = ChainRecord(model="m", noted=("b/versions/2-1-00000002",))
    links = (anchor(1), link(2), link(3), anchor(4))
    record = replace(record, links=links)
    for number in range(5, MAX_HISTORY + 20):
        record = chain.committed(record, manifest((anchor(number),)))
    assert len(record.links) == MAX_HISTORY
    assert record.links[:2] == links[:2]
    assert record.links[2].version > 4


def test_the_record_keeps_the_last_two_folders_of_weights_and_each_adapter() -> None:
    """The record keeps the last two folders of the weights and of each adapter. A repeated folder changes nothing."""
    noted: tuple[str, ...] = ()
    for objects in ("b/versions/1", "b/adapters/a/1", "b/versions/2", "b/versions/2", "b/versions/3", "b/adapters/b/1"):
        noted = chain.noted(noted, objects)
    assert set(noted) == {"b/versions/2", "b/versions/3", "b/adapters/a/1", "b/adapters/b/1"}
    assert noted.index("b/versions/2") < noted.index("b/versions/3")


def test_the_record_removes_adapters_that_the_state_no_longer_records() -> None:
    """The record removes adapters that the desired state no longer records. The last two folders of weights stay."""
    record = ChainRecord(model="m", noted=("b/versions/1", "b/adapters/a/1", "b/adapters/c/1", "b/versions/2"))
    trimmed = chain.trimmed(record, {"b/adapters/c/2"}, set(record.noted))
    assert trimmed.noted == ("b/versions/1", "b/adapters/c/1", "b/versions/2")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("versions/7-1-0123abcd/delta-0000", ("versions/7-1-0123abcd", "0123abcd")),
        ("adapters/x/7-1-0123abcd/a/b", ("adapters/x/7-1-0123abcd", "0123abcd")),
        ("ranks/7-1-0123abcd/3/list", ("ranks/7-1-0123abcd", "0123abcd")),
        ("versions/chain", None),
        ("versions/7-1-0123abcd", None),
        ("versions/7-1-0123abcdef/x", None),
        ("versions/weights/7-0123abcd/x", None),
        ("m/weights/7-0123abcd/x", None),
    ],
)
def test_only_versions_adapters_and_lists_of_ranks_are_folders_of_the_chain(
    name: str, folder: tuple[str, str] | None
) -> None:
    """A folder that is no version, adapter or list of ranks belongs to others and is never deleted."""
    assert chain.folder_of(name) == folder


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model":"m","links":[1]}', '{"model":1}', "\ud800"])
def test_an_invalid_record_is_an_error(text: str) -> None:
    """An invalid record raises `RemoteProtocolError`."""
    with pytest.raises(RemoteProtocolError, match="does not decode"):
        decode_chain(text)


STEP = st.tuples(
    st.sampled_from(["delta", "both", "anchor"]),
    st.booleans(),  # recorded
    st.booleans(),  # cleaned
    st.sampled_from([1.0, 600.0, 4000.0]),  # seconds that pass
)


@pytest.mark.proves("P86")
@given(st.lists(STEP, min_size=1, max_size=60), st.data())
def test_cleaning_keeps_all_objects_that_a_recorded_version_needs(
    steps: list[tuple[str, bool, bool, float]], data: st.DataObject
) -> None:
    """Each fetch plan of the last two recorded versions and of the last published version works after cleaning.

    Other versions are deleted.
    """
    record, now = ChainRecord(model="m"), 0.0
    stored: dict[str, float] = {}
    manifests: dict[str, tuple[Link, ...]] = {}
    for number, (what, is_recorded, is_cleaned, seconds) in enumerate(steps, start=1):
        now += seconds
        own = {"delta": link(number), "both": anchor(number, delta=1), "anchor": anchor(number)}[what]
        if not record.links:
            own = anchor(number)
        manifests[own.objects] = chain.links_with(record.links, own)
        stored[own.objects] = now
        record = replace(record, links=(*record.links, own))
        recorded = set(record.noted[-1:])
        if is_recorded:
            young = [objects for objects, at in stored.items() if now - at < chain.YOUNG_S]
            objects = data.draw(st.sampled_from(young))
            record, recorded = replace(record, noted=chain.noted(record.noted, objects)), {objects}
        if not is_cleaned:
            continue
        ages = {objects: now - at for objects, at in stored.items()}
        kept = chain.kept(record.links, recorded | set(record.noted), ages)
        record = chain.trimmed(record, recorded, kept)
        stored = {objects: at for objects, at in stored.items() if objects in kept}
        for objects in {*record.noted, own.objects}:
            links = manifests[objects]
            for plan in fetch_plans(links, {one.digest for one in links[:-1]}):
                needed = {one.objects for one in (*plan.deltas, *([plan.anchor] if plan.anchor else []))}
                assert needed <= stored.keys(), plan
        assert len(chain.kept(record.links, set(), dict.fromkeys(stored, math.inf))) <= len(manifests[own.objects])


def test_a_new_sign_resets_the_silence() -> None:
    """A new sign resets the silence, and silence lasts as long as the observer has read the same sign."""
    silence = Silence()
    signs = ((7, 100.0), (7, 101.0), (7, 103.0), (8, 104.0), (8, 105.0))

    assert [silence.record(sign, now) for sign, now in signs] == [0.0, 1.0, 3.0, 0.0, 1.0]


@pytest.mark.parametrize("outage_s", [60.0, 3600.0])
def test_an_outage_counts_as_one_period_of_silence(outage_s: float) -> None:
    """An outage counts as one period of silence, because the observer could not read the peer's sign."""
    silence = Silence()
    silence.record(7, 0.0)
    assert silence.record(7, outage_s) == SIGN_S


def digests(*numbers: int) -> set[str]:
    """Return the digests of folders in the worker's cache."""
    return {f"{number:064x}" for number in numbers}


CHAIN = [link(0, delta=None, anchor=100), link(1), link(2, anchor=100), link(3)]


def test_plans_are_in_the_order_of_their_bytes() -> None:
    """Plans start from a cached folder, then the newer anchor, then the older one in case the newer is damaged."""
    assert fetch_plans(CHAIN, digests(1)) == [
        FetchPlan(digests(1).pop(), None, (CHAIN[2], CHAIN[3])),
        FetchPlan(None, CHAIN[2], (CHAIN[3],)),
        FetchPlan(None, CHAIN[0], (CHAIN[1], CHAIN[2], CHAIN[3])),
    ]


def test_if_the_newest_version_is_cached_the_first_plan_fetches_nothing() -> None:
    """If the newest version is cached, the first plan fetches nothing."""
    first = fetch_plans(CHAIN, digests(0, 3))[0]

    assert (first.base, first.deltas, first.fetched_bytes) == (digests(3).pop(), (), 0)


def test_an_anchor_is_fetched_before_deltas_that_are_larger() -> None:
    """If the deltas are larger than an anchor, as after large training steps, the anchor is fetched instead."""
    chain = [link(0, delta=None, anchor=100), link(1, delta=80), link(2, delta=80, anchor=100)]

    assert fetch_plans(chain, digests(0))[0] == FetchPlan(None, chain[2], ())


def test_a_chain_without_an_anchor_and_a_cached_version_has_no_plan() -> None:
    """A chain without an anchor and without a cached version has no plan."""
    assert fetch_plans([link(1), link(2)], set()) == []
    assert fetch_plans([], digests(1)) == []


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)), max_size=6),
    st.sets(st.integers(0, 5)),
)
def test_every_plan_leads_to_the_newest_version(sizes: list[tuple[int | None, int | None]], at_hand: set[int]) -> None:
    """Each plan starts from a cached folder or an anchor, and applies each later delta once and in order."""
    chain = [link(number, delta=delta, anchor=anchor) for number, (delta, anchor) in enumerate(sizes)]
    plans = fetch_plans(chain, digests(*at_hand))

    for plan in plans:
        begin = next(one for one in chain if one.digest == plan.base or one == plan.anchor)
        assert (plan.base is None) != (plan.anchor is None)
        assert list(plan.deltas) == chain[chain.index(begin) + 1 :]
        assert all(delta.delta_bytes is not None for delta in plan.deltas)
    assert [plan.fetched_bytes for plan in plans] == sorted(plan.fetched_bytes for plan in plans)
