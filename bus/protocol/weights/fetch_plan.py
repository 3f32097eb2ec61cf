"""Which versions of a chain a worker fetches to get the newest one, given what lies on its machine."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ....schemas.manifest import Link

__all__ = ["FetchPlan", "fetch_plans"]


class FetchPlan(NamedTuple):
    """One way to the newest version."""

    base: str | None
    """Digest of the folder at hand with which it begins; None: it begins with the anchor of `anchor`."""
    anchor: Link | None
    """Whose anchor is fetched; None: none is."""
    deltas: tuple[Link, ...]
    """Whose deltas are applied after that, in this order."""

    @property
    def fetched_bytes(self) -> int:
        """How much comes over the network."""
        anchor_bytes = 0 if self.anchor is None else self.anchor.anchor_bytes or 0
        return anchor_bytes + sum(link.delta_bytes or 0 for link in self.deltas)


def fetch_plans(links: Sequence[Link], at_hand: AbstractSet[str]) -> list[FetchPlan]:
    """Return all ways to the last of `links`, the one that fetches least first.

    Those after the first are for when something of it is missing or wrong.

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
