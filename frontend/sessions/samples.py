"""The sample of a leaf: all tokens of its path, and which of them were sampled, when, and by which weights."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from ...schemas.decoding import JsonObject
from ...schemas.rows import Float32s, Int32s, Rows
from .errors import SessionError
from .tree import SessionTree, Turn, float32, int32

NOT_SAMPLED = -1
"""Weight version of a token that was not sampled, as in `rollbus.trainer`."""
Shape = Literal["rollbus", "rllm", "verifiers"]
"""The format of the samples. `rllm` and `verifiers`: one object for each turn, as these trainers read traces."""


class LeafSample(msgspec.Struct, kw_only=True, frozen=True):
    """The tokens of one leaf, S in all."""

    leaf: str
    """Id of the leaf's turn."""
    turns: list[str]
    """Ids of the turns on the path, from the root."""
    token_ids: list[int]
    loss_mask: list[bool]
    """True where the token was sampled."""
    logprobs: list[float]
    """Log probabilities from the sampler; 0 where not sampled."""
    weight_versions: list[int]
    """-1 where not sampled."""
    turn_of_token: list[int]
    """For each token, the place of its turn in `turns`."""
    finish_reason: str
    is_complete: bool
    joins: list[str]
    """For each turn, how its prompt was joined to the ids before it."""
    forks: list[JsonObject | None]
    """For each turn, why it did not continue the newest one."""
    attempts: list[int]
    reward: float | None
    """The reward of the leaf, or else of the session."""
    turn_rewards: dict[str, float]
    """Rewards of turns on the path, by the turn's id."""
    messages: list[JsonObject]


def leaf_sample(tree: SessionTree, leaf: Turn, rewards: Mapping[str, float], reward: float | None) -> LeafSample:
    """Return the sample of a leaf.

    Args:
        rewards: rewards by the id of a turn.
        reward: reward of the session.
    """
    path = tree.path(leaf)
    size = sum(turn.num_prompt + turn.num_sampled for turn in path)
    mask, logprobs = np.zeros(size, np.bool_), np.zeros(size, np.float32)
    versions, places = np.full(size, NOT_SAMPLED, np.int32), np.zeros(size, np.int32)
    at = 0
    for place, turn in enumerate(path):
        begin = at + turn.num_prompt
        end = begin + turn.num_sampled
        mask[begin:end] = True
        logprobs[begin:end] = float32(turn.logprobs)
        versions[begin:end] = int32(turn.weight_versions)
        places[at:end] = place
        at = end
    return LeafSample(
        leaf=leaf.id,
        turns=[turn.id for turn in path],
        token_ids=tree.token_ids(leaf).tolist(),
        loss_mask=mask.tolist(),
        logprobs=_floats(logprobs),
        weight_versions=versions.tolist(),
        turn_of_token=places.tolist(),
        finish_reason=leaf.finish_reason,
        is_complete=leaf.is_complete,
        joins=[turn.join for turn in path],
        forks=[None if turn.fork is None else msgspec.to_builtins(turn.fork) for turn in path],
        attempts=[turn.attempts for turn in path],
        reward=rewards.get(leaf.id, reward),
        turn_rewards={turn.id: rewards[turn.id] for turn in path if turn.id in rewards},
        messages=tree.messages(leaf),
    )


def join_rows(path: list[Turn], rows: Mapping[str, Rows]) -> Rows:
    """Return the rows of a path, u1|u2[S - 1, L, K].

    A turn has the row of the last token before it, which its parent could not have.

    Args:
        path: the turns from the root.
        rows: rows by the turn's id.

    Raises:
        SessionError: `rows_missing`: the rows leave a hole, overlap, or are of another count than tokens.
    """
    at = 0
    for turn in path:
        found = rows.get(turn.id)
        if found is None or len(found) != turn.num_rows or turn.rows_start != at:
            have = "no rows" if found is None else f"{len(found)} rows from position {turn.rows_start}"
            raise SessionError("rows_missing", f"turn {turn.id} has {have}; expected rows from position {at} on")
        at += len(found)
    size = sum(turn.num_prompt + turn.num_sampled for turn in path)
    if at != size - 1:
        raise SessionError("rows_missing", f"{size} tokens have {at} rows; expected {size - 1}")
    return np.concatenate([rows[turn.id] for turn in path])


def turn_traces(tree: SessionTree, leaf: Turn, shape: Shape, session: str) -> list[JsonObject]:
    """Return the turns of a path as traces of rllm's gateway, or as steps of a trajectory of verifiers."""
    found: list[JsonObject] = []
    for turn in tree.path(leaf):
        whole = tree.token_ids(turn)
        split = len(whole) - turn.num_sampled
        prompt_ids, ids = whole[:split].tolist(), whole[split:].tolist()
        prompt, logprobs = [*tree.messages(_parent(tree, turn)), *turn.messages], _floats(float32(turn.logprobs))
        if shape == "rllm":
            versions = int32(turn.weight_versions)
            found.append(
                {
                    "trace_id": turn.id,
                    "session_id": session,
                    "timestamp": turn.served_at,
                    "messages": prompt,
                    "response_message": turn.answer,
                    "prompt_token_ids": prompt_ids,
                    "completion_token_ids": ids,
                    "logprobs": logprobs,
                    "finish_reason": turn.finish_reason,
                    "weight_version": int(versions[-1]) if len(versions) else None,
                }
            )
        else:
            tokens: dict[str, Any] = {
                "prompt_ids": prompt_ids,
                "prompt_mask": [0] * len(prompt_ids),
                "completion_ids": ids,
                "completion_mask": [1] * len(ids),
                "completion_logprobs": logprobs,
                "is_truncated": turn.finish_reason == "length",
            }
            found.append({"prompt": prompt, "completion": [turn.answer], "tokens": tokens, "trajectory_id": leaf.id})
    return found


def _parent(tree: SessionTree, turn: Turn) -> Turn | None:
    return None if turn.parent is None else tree.turns[turn.parent]


def _floats(values: Float32s) -> list[float]:
    found: list[float] = np.maximum(values, np.finfo(np.float32).min).tolist()
    return found


def ids_bytes(ids: "list[int] | Int32s") -> bytes:
    """Return ids as a turn stores them."""
    return np.asarray(ids, "<i4").tobytes()
