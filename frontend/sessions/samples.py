"""The sample of a leaf: all tokens of its path, and which of them were sampled, when, and by which weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from ...bus.protocol.stream.result_arrays import Spans, find_spans
from ...schemas.decoding import JsonObject
from ...schemas.rows import Float32s, Int32s, Rows
from .messages import text_of
from .tree import SessionError, SessionTree, Turn, float32, int32

NOT_SAMPLED = -1
"""Weight version of a token that was not sampled, as in `rollbus.trainer`."""
ARRAYS = ("loss_mask", "logprobs", "weight_versions", "turn_of_token", "kv_version_spans", "kv_lora_version_spans")
"""Fields of a sample that grow with each turn."""
Shape = Literal["rollbus", "rllm", "verifiers"]
"""The format of the samples. `rllm`: a list with an object for each turn, as its gateway answers
`/sessions/ID/traces`. `verifiers`: a `Trace`, without the fields `task` and `agent`, which a session does not know."""


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
    """For each turn, how its prompt was joined to the ids before it. The last one is never `tail`: if the last turn was
    not compared when it ran, it is when the sample is read."""
    forks: list[JsonObject | None]
    """For each turn, why it did not continue the newest one."""
    attempts: list[int]
    kv_version_spans: list[Spans | None]
    """For each turn: (first position, weight version) of each span of the KV at the turn's end, which covers all
    positions but the last one; None: the worker did not report it. The first span begins at 0 even if its KV is from
    the prefix cache, because no request uses cache of other weights. KV that the engine computed again in the turn has
    the newer version, also for tokens that were sampled before that."""
    kv_lora_version_spans: list[Spans | None]
    """The same with the version of the adapter; None also if the turn used no adapter."""
    reward: float | None
    """The reward of the leaf, or else of the session."""
    turn_rewards: dict[str, float]
    """Rewards of turns on the path, by the turn's id."""
    messages: list[JsonObject]


def leaf_sample(
    tree: SessionTree, leaf: Turn, rewards: Mapping[str, float], reward: float | None, join: str
) -> LeafSample:
    """Return the sample of a leaf.

    Args:
        rewards: rewards by the id of a turn.
        reward: reward of the session.
        join: how the prompt of the leaf was joined.
    """
    path, at = tree.path(leaf), 0
    arrays: dict[str, list[Any]] = {name: [] for name in ARRAYS}
    for place, turn in enumerate(path):
        new, size = turn.num_prompt, turn.num_sampled
        arrays["loss_mask"] += [False] * new + [True] * size
        arrays["logprobs"] += [0.0] * new + _floats(float32(turn.logprobs))
        arrays["weight_versions"] += [NOT_SAMPLED] * new + int32(turn.weight_versions).tolist()
        arrays["turn_of_token"] += [place] * (new + size)
        arrays["kv_version_spans"].append(_spans(turn, turn.weight_versions, at + new))
        arrays["kv_lora_version_spans"].append(_spans(turn, turn.lora_versions, at + new))
        at += new + size
    return LeafSample(
        leaf=leaf.id,
        turns=[turn.id for turn in path],
        token_ids=tree.token_ids(leaf).tolist(),
        **arrays,
        finish_reason=leaf.finish_reason,
        is_complete=leaf.is_complete,
        joins=[*(turn.join for turn in path[:-1]), join],
        forks=[None if turn.fork is None else msgspec.to_builtins(turn.fork) for turn in path],
        attempts=[turn.attempts for turn in path],
        reward=rewards.get(leaf.id, reward),
        turn_rewards={turn.id: rewards[turn.id] for turn in path if turn.id in rewards},
        messages=tree.messages(leaf),
    )


def _spans(turn: Turn, versions: bytes, prompt_len: int) -> Spans | None:
    if turn.kv_from is None or not versions:
        return None
    return find_spans(int32(versions), max(turn.kv_from, 0), prompt_len)


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


def rllm_traces(tree: SessionTree, leaves: Sequence[Turn], session: str) -> Iterator[JsonObject]:
    """Yield the turns of the leaves' paths as traces of rllm's gateway, each once. Each has its whole history."""
    for turn in _turns_of(tree, leaves):
        path, versions = tree.path(turn), int32(turn.weight_versions)
        parent = path[-2] if turn.parent else None
        prompt_ids = [*tree.token_ids(parent).tolist(), *int32(turn.prompt_ids).tolist()]
        yield {
            "trace_id": turn.id,
            "session_id": session,
            "model": tree.setting(turn)["model"],
            "timestamp": turn.served_at,
            "messages": [*tree.messages(parent), *turn.messages],
            "response_message": turn.answer,
            "prompt_token_ids": prompt_ids,
            "completion_token_ids": int32(turn.token_ids).tolist(),
            "logprobs": _floats(float32(turn.logprobs)),
            "finish_reason": _reason(turn),
            "token_counts": {"prompt": len(prompt_ids), "completion": turn.num_sampled},
            "weight_version": int(versions[-1]) if len(versions) else None,
        }


def verifiers_trace(tree: SessionTree, leaves: Sequence[Turn], session: str, reward: float | None) -> JsonObject:
    """Return the paths of the leaves as a trace of verifiers: a graph of messages, where each has the ids that it adds.

    The ids between two answers are those of the last message between them, with all that the template writes there.
    """
    nodes: list[JsonObject] = []
    calls: list[JsonObject] = []
    ends: dict[str | None, int | None] = {None: None}
    for turn in _turns_of(tree, leaves):
        parent, prompt, path = ends[turn.parent], int32(turn.prompt_ids).tolist(), tree.path(turn)
        setting = tree.setting(turn)
        tools = [tool["function"] for tool in setting["tools"] or ()]
        for at, message in enumerate([*turn.messages, turn.answer], 1):
            is_answer = at == turn.num_messages
            own = int32(turn.token_ids).tolist() if is_answer else prompt if at == len(turn.messages) else []
            node = {
                "parent": parent,
                "message": _verifiers_message(message),
                "sampled": is_answer,
                "timestamp": turn.served_at,
                "token_ids": own,
                "mask": [is_answer] * len(own),
                "logprobs": _floats(float32(turn.logprobs)) if is_answer else [],
            }
            nodes.append(node if parent is not None else {**node, "tools": tools})
            parent = len(nodes) - 1
        ends[turn.id] = parent
        size = sum(each.num_prompt + each.num_sampled for each in path)
        usage = {"prompt_tokens": size - turn.num_sampled, "completion_tokens": turn.num_sampled}
        calls.append({"node": parent, "model": setting["model"], "finish_reason": _reason(turn), "usage": usage})
    rewards = {} if reward is None else {"session": {"score": reward}}
    return {"id": session, "nodes": nodes, "calls": calls, "rewards": rewards, "is_completed": True, "ok": True}


def _verifiers_message(message: JsonObject) -> JsonObject:
    role, content = message["role"], text_of(message.get("content"))
    if role == "assistant":
        calls = [
            {"id": str(call.get("id") or ""), **{name: call["function"][name] for name in ("name", "arguments")}}
            for call in message.get("tool_calls") or ()
        ]
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        return {"role": role, "content": content, "reasoning_content": reasoning, "tool_calls": calls or None}
    if role == "tool":
        return {"role": role, "content": content, "tool_call_id": str(message.get("tool_call_id") or "")}
    return {"role": "user" if role == "user" else "system", "content": content}


def _turns_of(tree: SessionTree, leaves: Sequence[Turn]) -> list[Turn]:
    wanted = {turn.id for leaf in leaves for turn in tree.path(leaf)}
    return [turn for turn in tree.turns.values() if turn.id in wanted]


def _reason(turn: Turn) -> str | None:
    """Return the finish reason as harnesses have it; None: the turn was interrupted."""
    if turn.finish_reason == "stop" and turn.answer.get("tool_calls"):
        return "tool_calls"
    return turn.finish_reason if turn.finish_reason in ("stop", "length") else None


def _floats(values: Float32s) -> list[float]:
    found: list[float] = np.maximum(values, np.finfo(np.float32).min).tolist()
    return found


def ids_bytes(ids: "list[int] | Int32s") -> bytes:
    """Return ids as a turn stores them."""
    return np.asarray(ids, "<i4").tobytes()
