"""Decisions about a chain of published versions: the lease, anchor or delta, which folders stay, and which are fetched.

No I/O.
"""

import enum
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from msgspec.structs import replace

from ....schemas.errors import ControlCode, ControlError, LocalProtocolError
from ....schemas.manifest import MAX_HISTORY, MAX_LINKS, ChainRecord, Holder, Link, Manifest

LEASE_S: Final = 15.0
"""Seconds for which the lease is valid after its last renewal, by the server's clock."""
MARGIN_S: Final = 5.0
"""Seconds after the end of the lease before another publisher may acquire it, because a renewal may be in flight."""
MAX_DELTAS: Final = 16
"""Maximum number of deltas between two anchors. A new worker applies all of them one after another."""
YOUNG_S: Final = 3600.0
"""Age in seconds below which folders are kept: a controller may be about to record one, or a worker to fetch one."""
PRESSED_S: Final = 60.0
"""Replaces `YOUNG_S` if the bucket has no room: a controller needs seconds to record a version."""
SPARE_BYTES: Final = 4 * 1024**2
"""Bytes of a bucket that no publication fills, so that the chain record can always be written."""
_FOLDER: Final = re.compile(r"(?:versions|adapters/[^/]+|ranks)/\d+-\d+-(?P<tag>[0-9a-f]{8})")
SIGN_S: Final = 5.0
"""Seconds between two periodic messages of a rank. Rank 0 renews its lease at the same interval."""
SILENT_S: Final = 60.0
"""Seconds without such a message after which a rank counts as dead. The limit is long, because a trainer may hold the
interpreter lock for many seconds.
"""


class AnchorReason(enum.StrEnum):
    """The reason why a version needs an anchor."""

    FIRST = "first"
    """No version was published before."""
    NO_SNAPSHOT = "no_snapshot"
    """The publisher does not have the content of the last version for the comparison."""
    AFTER_TRANSFER = "after_transfer"
    """The fleet has received weights from a transfer engine since the last publication."""
    OLD_WORKERS = "old_workers"
    """A worker cannot decode deltas."""
    CHAIN_BYTES = "chain_bytes"
    """The deltas of the chain have more than half the bytes of an anchor."""
    CHAIN_LENGTH = "chain_length"
    """The chain has `MAX_DELTAS` deltas."""

    @property
    def is_required(self) -> bool:
        """True if a delta cannot replace the anchor."""
        return self not in {AnchorReason.CHAIN_BYTES, AnchorReason.CHAIN_LENGTH}


class Contents(NamedTuple):
    """The form in which a version is published: an anchor, a delta or both."""

    anchor: bool
    delta: bool


def lease_taken(record: ChainRecord, holder: Holder, age_s: float) -> ChainRecord:
    """Return the record in which `holder` has the lease, in a new epoch.

    Args:
        record: as it is stored.
        age_s: seconds since it was stored, by the server's clock.

    Raises:
        ControlError: `publisher_busy`: another publisher has it.
    """
    if record.holder is not None and age_s < LEASE_S + MARGIN_S:
        raise ControlError(
            ControlCode.PUBLISHER_BUSY,
            f"{record.holder.publisher} publishes weights of {record.model!r} and renewed its lease {age_s:.1f} s ago; "
            f"another publisher may take over {LEASE_S + MARGIN_S:g} s after the last renewal",
        )
    return replace(record, epoch=record.epoch + 1, holder=holder, opened=None)


def lease_kept(record: ChainRecord, holder: Holder, epoch: int, age_s: float) -> ChainRecord:
    """Return the record in which `holder` continues with its lease of `epoch`, or with a later one.

    Epochs only increase. If the record has an earlier epoch, the server has lost all its data or the latest part. Then
    `holder` acquires a new lease, and a publication under the lost lease cannot be committed.

    Args:
        record: as it is stored.
        age_s: seconds since it was stored, by the server's clock.

    Raises:
        ControlError: `publisher_busy`: another publisher has the lease.
    """
    if record.epoch < epoch:
        return lease_taken(replace(record, epoch=epoch), holder, age_s)
    # A later epoch: an unanswered write acquired the lease again.
    check_lease(record, holder, record.epoch if record.holder == holder else epoch)
    return record


def check_lease(record: ChainRecord, holder: Holder, epoch: int) -> None:
    """Check that `holder` still has the lease of `epoch`.

    Raises:
        ControlError: `publisher_busy`: another publisher has acquired the lease. `storage`: the server has lost the
            lease.
    """
    if (record.holder, record.epoch) == (holder, epoch):
        return
    if record.epoch < epoch:
        raise ControlError(
            ControlCode.STORAGE,
            f"the server has lost its store, and with it the lease of epoch {epoch} on the published weights of "
            f"{record.model!r}: the version in progress is not published; the next publication begins a new chain",
        )
    other = "another publisher" if record.holder is None else record.holder.publisher
    raise ControlError(
        ControlCode.PUBLISHER_BUSY,
        f"{other} took over the published weights of {record.model!r} in epoch {record.epoch}, while this publisher "
        f"({holder.publisher}, epoch {epoch}) did not renew its lease",
    )


def links_with(links: Sequence[Link], own: Link) -> tuple[Link, ...]:
    """Return the links for the manifest of `own`, which is committed after `links`.

    They begin with the last anchor before it, so that a worker with any version since then needs deltas only.

    Raises:
        LocalProtocolError: the version has a delta, but no anchor to apply it to.
    """
    if own.delta_bytes is None:
        return (own,)
    for start in reversed(range(len(links))):
        if links[start].anchor_bytes is not None:
            return (*links[start:], own)
    raise LocalProtocolError(f"version {own.version} is a delta, and there is no anchor before it")


def chain_length(links: Sequence[Link]) -> int:
    """Return how many versions there are after the last anchor."""
    return next((n for n, link in enumerate(reversed(links)) if link.anchor_bytes is not None), len(links))


def needs_anchor(
    links: Sequence[Link], *, snapshot: str | None, after_transfer: bool, workers_read_deltas: bool
) -> AnchorReason | None:
    """Return the reason why the next version needs an anchor, or None if a delta is sufficient.

    Args:
        links: of the chain record.
        snapshot: digest of the content that the publisher compares with. None: the publisher has no such content.
        after_transfer: the fleet received weights from a transfer engine since the last publication.
        workers_read_deltas: all workers of the model can decode deltas.
    """
    if not links:
        return AnchorReason.FIRST
    if snapshot != links[-1].digest:
        return AnchorReason.NO_SNAPSHOT
    if after_transfer:
        return AnchorReason.AFTER_TRANSFER
    if not workers_read_deltas:
        return AnchorReason.OLD_WORKERS
    length = chain_length(links)
    if length == len(links):
        return AnchorReason.FIRST
    if length >= MAX_DELTAS:
        return AnchorReason.CHAIN_LENGTH
    anchor, *deltas = links[-length - 1 :]
    if 2 * sum(link.delta_bytes or 0 for link in deltas) > (anchor.anchor_bytes or 0):
        return AnchorReason.CHAIN_BYTES
    return None


def contents(
    reason: AnchorReason | None, links: Sequence[Link], *, anchor_bytes: int, used: int, limit: int
) -> Contents:
    """Decide the form of the next version, before its first byte is stored.

    If only the length of the chain requires an anchor, and the bucket has no room for it, the version is a delta. If
    the bucket has no room for a delta beside an anchor, the version is the anchor alone.

    Args:
        reason: of `needs_anchor`.
        links: of the chain record.
        anchor_bytes: size of an anchor of this version.
        used: bytes that the bucket holds.
        limit: bytes that the bucket may hold.

    Raises:
        ControlError: `storage`: an anchor is needed, and the bucket has no room for it.
    """
    if reason is None:
        return Contents(anchor=False, delta=True)
    needed = needed_bytes(anchor_bytes)
    if used + needed <= limit:
        # Beside the anchor, for workers that have the previous version.
        may_have_delta = not reason.is_required or reason is AnchorReason.OLD_WORKERS
        has_room = used + needed_for_version(links, anchor_bytes) <= limit
        return Contents(anchor=True, delta=may_have_delta and has_room)
    if not reason.is_required and chain_length(links) + 1 < MAX_LINKS:
        return Contents(anchor=False, delta=True)
    raise ControlError(
        ControlCode.STORAGE,
        f"an anchor ({reason}) takes {needed} bytes, and of the bucket's {limit} bytes {used} are used; an admin can "
        "enlarge it: rollbus make-queue MODEL --upload-bytes N",
    )


def needed_bytes(content_bytes: int) -> int:
    """Return the bytes that a bucket needs for a content, with subjects, headers and the spare bytes of the record."""
    return content_bytes + content_bytes // 256 + SPARE_BYTES


def needed_for_version(links: Sequence[Link], anchor_bytes: int) -> int:
    """Return the bytes that an anchor needs with a delta beside it, as large as the largest delta of `links`."""
    return needed_bytes(anchor_bytes + _find_largest_delta(links))


def needed_for_chain(links: Sequence[Link]) -> int:
    """Return the bytes that a bucket needs: two anchors, each with a delta, and the deltas between them.

    A chain ends when its deltas exceed half an anchor. The last of them may be as large as the largest one of `links`.
    """
    anchor_bytes = max((link.anchor_bytes or 0 for link in links), default=0)
    return needed_bytes(2 * anchor_bytes + anchor_bytes // 2 + 3 * _find_largest_delta(links))


def committed(record: ChainRecord, manifest: Manifest) -> ChainRecord:
    """Return the record after the commit of a version. A version that is already in the record is not added again.

    Raises:
        ControlError: `storage`: the manifest is of a lease that the server has lost, and its objects with it.
        LocalProtocolError: the manifest does not continue this chain.
    """
    links, own = record.links, manifest.own
    if manifest.epoch < record.epoch:
        raise ControlError(
            ControlCode.STORAGE,
            f"the server has lost its store while version {manifest.version} was being published; it is not published",
        )
    if manifest.adapter is not None:
        expected: tuple[Link, ...] = (own,)
    elif own in links[-1:]:
        return replace(record, opened=None)
    else:
        expected = links_with(links, own)
        links = _drop_oldest((*links, own), record.noted)
    if manifest.links != expected:
        raise LocalProtocolError(
            f"the manifest of version {manifest.version} has {len(manifest.links)} links, which differ from the "
            f"{len(expected)} links since the last anchor"
        )
    return replace(record, links=links, opened=None)


def noted(folders: Sequence[str], objects: str) -> tuple[str, ...]:
    """Return the noted folders after `objects` was recorded.

    They are the last two folders of the weights and of each adapter, the later one last.
    """
    own = [folder for folder in folders if _parent_of(folder) == _parent_of(objects)]
    if own[-1:] == [objects]:
        return tuple(folders)
    own = [folder for folder in own if folder != objects]
    return (*(folder for folder in folders if _parent_of(folder) != _parent_of(objects)), *own[-1:], objects)


def kept(
    links: Sequence[Link], recorded: AbstractSet[str], ages: Mapping[str, float], *, young_s: float = YOUNG_S
) -> set[str]:
    """Return the folders of `ages` that stay: recorded folders, the newest folder of the chain, and young folders.

    All folders that the manifests of these folders name stay too.

    Args:
        links: of the chain record.
        recorded: folders that are recorded or were recorded before, of weights and adapters.
        ages: age in seconds of each folder in the store.
        young_s: age in seconds up to which a folder stays in any case.
    """
    roots = {folder for folder, age_s in ages.items() if age_s < young_s} | recorded
    roots.update(link.objects for link in links[-1:])
    needed = {
        other.objects for index, link in enumerate(links) if link.objects in roots for other in _own_links(links, index)
    }
    return (roots | needed) & ages.keys()


def trimmed(record: ChainRecord, recorded: AbstractSet[str], kept_folders: AbstractSet[str]) -> ChainRecord:
    """Return the record without the deleted folders.

    Args:
        record: before the deletion.
        recorded: folders that the desired state names. An adapter without a recorded folder is no longer noted.
        kept_folders: folders that stayed.
    """
    homes = {_parent_of(folder) for folder in recorded}
    return replace(
        record,
        links=tuple(link for link in record.links if link.objects in kept_folders),
        noted=tuple(
            folder
            for folder in record.noted
            if folder in kept_folders and (_parent_of(folder) in homes or is_weights(folder))
        ),
    )


def folder_of(name: str) -> tuple[str, str] | None:
    """Return the folder of a published object, and the tag of its object parts.

    Return None if the object belongs to no version.
    """
    found = _FOLDER.match(name)
    if found is None or not name[found.end() :].startswith("/"):
        return None
    return found[0], found["tag"]


def is_published(objects: str, bucket: str) -> bool:
    """Return True if a folder of this bucket is a published version, and not another upload."""
    return objects.startswith(f"{bucket}/") and folder_of(f"{objects.removeprefix(f'{bucket}/')}/") is not None


def is_weights(objects: str) -> bool:
    """Return True if a published folder is a version of the weights, and not of an adapter."""
    return _parent_of(objects).endswith("/versions")


def _drop_oldest(links: tuple[Link, ...], folders: Sequence[str]) -> tuple[Link, ...]:
    """Remove the oldest links above `MAX_HISTORY`, except links that a noted folder or the newest version needs."""
    if len(links) <= MAX_HISTORY:
        return links
    needed = kept(links, set(folders), {link.objects: YOUNG_S for link in links})
    spare = [link for link in links if link.objects not in needed][: len(links) - MAX_HISTORY]
    return tuple(link for link in links if link not in spare)


def _find_largest_delta(links: Sequence[Link]) -> int:
    return max((link.delta_bytes or 0 for link in links), default=0)


def _own_links(links: Sequence[Link], index: int) -> tuple[Link, ...]:
    """Return the links of the manifest of `links[index]`, as far as `links` has them."""
    try:
        return links_with(links[:index], links[index])
    except LocalProtocolError:
        return (links[index],)


def _parent_of(objects: str) -> str:
    return objects.rpartition("/")[0]


class FetchPlan(NamedTuple):
    """One sequence of folders and downloads that results in the newest version."""

    base: str | None
    """Digest of the local folder that the plan starts from. None: the plan starts from `anchor`."""
    anchor: Link | None
    """The link with the anchor to fetch. None: the plan fetches no anchor."""
    deltas: tuple[Link, ...]
    """The links with the deltas to apply after that, in this order."""

    @property
    def fetched_bytes(self) -> int:
        """The bytes to fetch over the network."""
        anchor_bytes = 0 if self.anchor is None else self.anchor.anchor_bytes or 0
        return anchor_bytes + sum(link.delta_bytes or 0 for link in self.deltas)


def fetch_plans(links: Sequence[Link], at_hand: AbstractSet[str]) -> list[FetchPlan]:
    """Return all plans for the last of `links`, the one with the fewest bytes first.

    Use the next plan if an object of a plan is missing or wrong.

    Args:
        links: of the newest version's manifest, from older to newer.
        at_hand: digests of the folders on this machine.
    """
    plans = []
    deltas: tuple[Link, ...] = ()
    for link in reversed(links):
        if link.digest in at_hand:
            plans.append(FetchPlan(link.digest, None, deltas))
        if link.anchor_bytes is not None:
            plans.append(FetchPlan(None, link, deltas))
        if link.delta_bytes is None:
            break
        deltas = (link, *deltas)
    return sorted(plans, key=lambda plan: plan.fetched_bytes)


class Silence:
    """The silence of one peer, whose messages have changing numbers.

    The time between two calls counts for at most one period, because no message can arrive while the server is
    unavailable.
    """

    def __init__(self) -> None:
        self._sign: int | None = None
        self._recorded_at = 0.0
        self._silent_s = 0.0

    def record(self, sign: int, now: float) -> float:
        """Record the number of the last message. Return the seconds for which the number has been the same."""
        if sign == self._sign:
            self._silent_s += min(now - self._recorded_at, SIGN_S)
        else:
            self._sign, self._silent_s = sign, 0.0
        self._recorded_at = now
        return self._silent_s
