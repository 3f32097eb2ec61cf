"""What the next version is published as: decided, and refused, before its first byte is stored."""

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
    """Plans the versions of one model. Lives on the bus thread.

    Args:
        updates: know the desired state, and what the workers would refuse.
        versions: the store, with the lease.
        watcher: knows the workers.
        loader: cleans the store.
        model: whose weights.
        num_ranks: that publish together.
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
        """One line with the model."""
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
        """Return the links after which the version is committed, and what it stores.

        Args:
            options: what the publication is asked for.
            snapshot: what this publisher has committed before.
            kinds: of the tensors of the checkpoint; None: there is none.
            given_bytes: of the tensors of this rank, as far as that is known; 0: it is not.
            is_out_of_step: other ranks, or workers, may not have the snapshot's content.

        Raises:
            InvalidRequest: workers would refuse the version.
            ControlError: the desired state refuses it; or the bucket has no room for it, also after it was cleaned.
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
                f"version {options.command.version} is not newer than {links[-1].version}, which was published last; "
                "allow_rollback permits it all the same",
            )
        recorded = state.registers.get("weights")
        reason = needs_anchor(
            links,
            snapshot=None if is_out_of_step else snapshot.digest or None,
            after_transfer=recorded is not None and isinstance(recorded.command, FinishWeightUpdate),
            # Of one that starts it is not known; restarts must not make each version a whole checkpoint.
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
    """Return the bytes of an anchor of this version; without a checkpoint at least those that are known of."""
    if kinds is not None:
        return sum(kind.size for kind in kinds.values())
    own = sum(tensor.kind.size for tensor in snapshot.tensors.values())
    # Of several ranks each knows its own tensors only; what was published before has all of them.
    return max(given_bytes, own, *(link.anchor_bytes or 0 for link in links))
