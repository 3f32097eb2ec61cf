"""Decides which versions of a chain a worker fetches to get the newest one, given the folders on its machine."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ....schemas.manifest import Link

__all__ = ["FetchPlan", "fetch_plans"]


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
