"""Joins the tensors that several ranks give to one publication. Rank 0 does this."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ....schemas.chain import RankList
from ....schemas.errors import InvalidRequest
from ....schemas.manifest import DELTA_PREFIX, TensorEntry
from .tensors import TensorKind

__all__ = ["RankSums", "join_lists"]


class RankSums(NamedTuple):
    """Tensors and sizes of the objects that the other ranks have stored."""

    entries: list[TensorEntry]
    """Entries of all ranks, in the manifest's order."""
    num_changed: int
    delta_bytes: int
    anchor_bytes: int


def join_lists(
    own: Sequence[TensorEntry], lists: Iterable[RankList], kinds: Mapping[str, TensorKind] | None, *, has_delta: bool
) -> RankSums:
    """Join the lists of all ranks.

    Args:
        kinds: kinds of all required tensors, by name. None: the given tensors are complete.
        has_delta: True if the publication has a delta. A delta leaves out unchanged tensors.

    Raises:
        InvalidRequest: two ranks gave the same tensor, or no rank gave a required tensor.
    """
    given = list(lists)
    ranks = {entry.name: 0 for entry in own}
    for rank_list in given:
        for entry in rank_list.tensors:
            if (other := ranks.setdefault(entry.name, rank_list.rank)) != rank_list.rank:
                problem = f"was given by ranks {other} and {rank_list.rank}"
                raise _bad(entry.name, problem, "each tensor from one rank")
    missing = next((name for name in kinds or () if name not in ranks), None)
    if missing is not None:
        raise _bad(missing, "was given by no rank", "all tensors of the checkpoint")
    others = [entry for rank_list in given for entry in rank_list.tensors]
    sizes = {stored.name.rpartition("/")[2]: stored.size for rank_list in given for stored in rank_list.objects}
    delta_bytes = sum(size for name, size in sizes.items() if name.startswith(DELTA_PREFIX))
    return RankSums(
        # Sorting keeps the order within a file, because one rank has written the file.
        sorted((*own, *others), key=lambda entry: entry.file),
        sum(entry.delta is not None or not has_delta for entry in others),
        delta_bytes,
        sum(sizes.values()) - delta_bytes,
    )


def _bad(name: str, problem: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(field=f"named_tensors[{name[:200]!r}]", problem=problem, allowed=allowed)
