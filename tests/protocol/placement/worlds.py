"""Workers and prompts for the placement tests."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rollbus.bus.protocol.queue.load import PIECE_TOKENS, PrefixScope, WorkerLoad, piece_hashes
from rollbus.bus.protocol.queue.placement import PlacementNeeds, PlacementPolicy
from rollbus.schemas.presence import WorkerPresence
from tests.support import fleet as presences

SCOPE = PrefixScope()


def presence(worker: str, *, free_slots: int = 8, **fields: Any) -> WorkerPresence:
    """Return the presence of a worker that serves without requests."""
    return presences.presence(**{"worker": worker, "incarnation": "i1", "free_slots": free_slots} | fields)


def prompt(seed: int, num_tokens: int = 8 * PIECE_TOKENS) -> npt.NDArray[np.int32]:
    """Return a prompt that shares no prefix with the prompts of other seeds."""
    return np.random.default_rng(seed).integers(0, 1000, num_tokens, np.int32)


def placement_needs(
    token_ids: npt.NDArray[np.int32],
    *,
    scope: PrefixScope = SCOPE,
    session: str | None = None,
    group: str | None = None,
    is_for_able_only: bool = False,
) -> PlacementNeeds:
    """Return what placement needs to know of a request with this prompt."""
    return PlacementNeeds(
        len(token_ids),
        piece_hashes(token_ids, scope),
        scope,
        session_id=session,
        group_id=group,
        is_for_able_only=is_for_able_only,
    )


def fleet(*presences: WorkerPresence, now: float = 0.0) -> PlacementPolicy:
    """Return a policy that has received these presences."""
    policy = PlacementPolicy()
    for each in presences:
        policy.update(each, now)
    return policy


def loads(policy: PlacementPolicy, *workers: str) -> list[WorkerLoad]:
    """Return the loads of these workers."""
    return [load for worker in workers if (load := policy.loads.get(worker)) is not None]
