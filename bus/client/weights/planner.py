"""Decides how the next version is published, and rejects it before its first byte is stored."""

from collections.abc import Mapping

from ....schemas.control import FinishWeightUpdate
from ....schemas.errors import ControlCode, ControlError
from ....schemas.manifest import Link
from ...control.updates import Updates
from ...control.versions import VersionStore
from ...protocol.weights.chain import contents, needed_for_version, needs_anchor
from ..presence_watcher import PresenceWatcher
from .draft import DraftPlan
from .fleet_loader import FleetLoader
from .options import PublishOptions
from .snapshot import Snapshot
from .tensors import TensorKind

__all__ = ["VersionPlanner"]


class VersionPlanner:
    """Plans the versions of one model. It runs on the bus thread.

    Args:
        updates: reads the desired state, and checks if workers would reject a version.
        versions: store of the versions, with the lease.
        watcher: tracks the workers.
        loader: cleans the store.
        model: name of the model.
        num_ranks: number of processes that publish together.
    """

    def __init__(
        self,
        updates: Updates,
        versions: VersionStore,
        watcher: PresenceWatcher,
        loader: FleetLoader,
        model: str,
        num_ranks: int,
    ) -> None:
        self._updates = updates
        self._versions = versions
        self._watcher = watcher
        self._loader = loader
        self._model = model
        self._num_ranks = num_ranks

    def __repr__(self) -> str:
        """Return one line with the model."""
        return f"<VersionPlanner {self._model}>"

    async def plan(
        self,
        options: PublishOptions,
        snapshot: Snapshot,
        *,
        kinds: Mapping[str, TensorKind] | None,
        given_bytes: int,
        is_out_of_step: bool,
    ) -> tuple[tuple[Link, ...], DraftPlan]:
        """Return the links before the new version, and the plan of the parts to store.

        Args:
            options: options of the publication.
            snapshot: last version that this publisher committed.
            kinds: kinds of the tensors of the checkpoint. None: there is no checkpoint.
            given_bytes: bytes of this rank's tensors. 0: unknown.
            is_out_of_step: True if other ranks or workers may not have the snapshot's content.

        Raises:
            InvalidRequest: workers would reject the version.
            ControlError: the desired state rejects the version, or the bucket has no room for it after a cleanup.
            BusBroken: JetStream or the connection failed.
        """
        state = await self._updates.state(self._model)
        await self._versions.refresh()
        links = self._versions.record.links
        if options.updates:
            await self._updates.check_version(options.command, min_staged=options.min_staged)
        elif links and options.command.version <= links[-1].version and not options.command.allow_rollback:
            raise ControlError(
                ControlCode.OLD_VERSION,
                f"version {options.command.version} is not newer than the last published version {links[-1].version}; "
                "set allow_rollback to publish it",
            )
        recorded = state.registers.get("weights")
        reason = needs_anchor(
            links,
            snapshot=None if is_out_of_step else snapshot.digest or None,
            after_transfer=recorded is not None and isinstance(recorded.command, FinishWeightUpdate),
            # A starting worker has no capabilities yet. Ignore it: otherwise each version would be a whole checkpoint.
            workers_read_deltas=all(
                worker.capabilities.weight_deltas
                for worker in await self._watcher.known_workers()
                if worker.model == self._model and worker.capabilities is not None
            ),
        )
        anchor_bytes = _anchor_bytes(links, snapshot, kinds, given_bytes)
        used, limit = await self._versions.used_and_limit()
        if used + needed_for_version(links, anchor_bytes) > limit:
            await self._loader.make_room()
            used, limit = await self._versions.used_and_limit()
            links = self._versions.record.links
        what = contents(reason, links, anchor_bytes=anchor_bytes, used=used, limit=limit)
        return links, DraftPlan(has_delta=what.delta, has_anchor=what.anchor, num_ranks=self._num_ranks)


def _anchor_bytes(
    links: tuple[Link, ...], snapshot: Snapshot, kinds: Mapping[str, TensorKind] | None, given_bytes: int
) -> int:
    """Return the size of an anchor of this version in bytes. Without a checkpoint, this is a lower bound."""
    if kinds is not None:
        return sum(kind.size for kind in kinds.values())
    own = sum(tensor.kind.size for tensor in snapshot.tensors.values())
    # With several ranks, each rank knows only its own tensors. Earlier links have the size of all tensors.
    return max(given_bytes, own, *(link.anchor_bytes or 0 for link in links))
