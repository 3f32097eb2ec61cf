"""Makes a request from a `Sample` of slime or vime, and fills the sample with the answer. No I/O.

The names of attributes, statuses and arguments are those of THUDM/slime at commit 624b824 (`slime/utils/types.py`,
`slime/rollout/sglang_rollout.py`) and of vllm-project/vime at commit 2b83ea2.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np

from ...bus.client.generation import Generation
from ...schemas.chunk import FinishReason
from ...schemas.errors import InvalidRequest
from ...schemas.request import GenerateRequest, num_kept_rows
from ...schemas.sampling import SamplingParams
from ..rows import convert_rows
from .connection import Settings

STATUSES: Final = {
    FinishReason.STOP: "COMPLETED",
    FinishReason.LENGTH: "TRUNCATED",
    FinishReason.REPETITION: "TRUNCATED",
    FinishReason.ABORT: "ABORTED",
}
"""The name of the status of a sample, by the reason why its generation ended."""
ROW_DTYPE: Final = "int32"
"""Dtype to which slime and vime convert routed experts."""
NOT_SAMPLED: Final = -1
"""Version of response tokens that another function has appended, for example of a tool's answer."""
NAMES: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "seed": "seed",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_token_ids": "stop_token_ids",
    "repetition_penalty": "repetition_penalty",
}
"""The field of `SamplingParams`, by slime's name."""
OF_TEXT: Final = frozenset({"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "custom_params"})
"""Parameters for text, which this module makes itself, and slime's own switch for the masks of top-p."""


def sampling_of(params: Mapping[str, Any], num_done: int) -> SamplingParams | None:
    """Return the sampling parameters for the rest of a response. None: no token is left to generate.

    Args:
        params: slime's parameters of the whole response.
        num_done: tokens that the response already has.

    Raises:
        InvalidRequest: a parameter is unknown or has a wrong value, or the response is longer than allowed.
    """
    fields: dict[str, Any] = {}
    for name, value in params.items():
        if name == "stop" and value:
            allowed = "none: give --rollout-stop-token-ids; the bus carries no text"
            raise InvalidRequest(field="stop", problem=f"is {value!r}", allowed=allowed)
        if name in NAMES and value is not None:
            fields[NAMES[name]] = value
        elif name not in NAMES and name not in OF_TEXT and name != "stop":
            allowed = ", ".join([*NAMES, *sorted(OF_TEXT)])
            raise InvalidRequest(field=f"sampling_params.{name}", problem="is unknown", allowed=allowed)
    most = fields.get("max_tokens")
    if not isinstance(most, int) or isinstance(most, bool) or most < num_done:
        problem = f"is {most!r} and the response has {num_done} tokens"
        raise InvalidRequest(field="max_new_tokens", problem=problem, allowed=f"{num_done} or more")
    if most == num_done:
        return None
    fields["max_tokens"] = most - num_done
    fields["min_tokens"] = max(0, fields.get("min_tokens", 0) - num_done)
    return SamplingParams(**fields)


def prompt_of(sample: Any, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Return the tokens that a sample has: those so far, or those of its prompt.

    Raises:
        InvalidRequest: the prompt is not text, or has images, audio or video.
    """
    if any(value is not None for value in (sample.multimodal_inputs or {}).values()):
        raise InvalidRequest(field="multimodal_inputs", problem="are set", allowed="text only")
    if sample.tokens:
        return [int(token) for token in sample.tokens]
    if not isinstance(sample.prompt, str):
        allowed = "text: set --apply-chat-template"
        raise InvalidRequest(field="prompt", problem=f"is {type(sample.prompt).__name__}", allowed=allowed)
    return [int(token) for token in encode(sample.prompt)]


def needs_masks(args: Any, *, evaluation: bool) -> bool:
    """Return True if the trainer needs the ids from which each token was sampled."""
    return getattr(args, "rollout_top_p", 1.0) != 1.0 and not evaluation


def request_of(
    args: Any, sample: Any, sampling: SamplingParams, tokens: list[int], settings: Settings, *, evaluation: bool
) -> GenerateRequest:
    """Return the request for the rest of a sample's response. It asks only for rows that the sample does not have.

    Raises:
        InvalidRequest: a value is wrong, or the sample has more rows than tokens.
    """
    if getattr(args, "use_score_centering", False) and not evaluation:
        allowed = "false: the bus has no log probabilities of the whole mask"
        raise InvalidRequest(field="use_score_centering", problem="is true", allowed=allowed)
    wants_rows = bool(getattr(args, "use_rollout_routing_replay", False)) and not evaluation
    rows = sample.rollout_routed_experts
    start = 0 if rows is None or not wants_rows else len(rows)
    if start > max(0, len(tokens) - 1):
        problem = f"have {start} rows for {len(tokens)} tokens"
        raise InvalidRequest(
            field="rollout_routed_experts", problem=problem, allowed="a row less than tokens, or fewer"
        )
    group = getattr(sample, "group_index", None)
    return GenerateRequest(
        prompt_token_ids=tokens,
        sampling=sampling,
        model=settings.model,
        timeout_s=settings.timeout_s,
        session_id=sample.session_id,
        group_id=f"slime-{group}" if isinstance(group, int) and not sample.response_length else None,
        return_routed_experts=wants_rows,
        routed_experts_prompt_start=start,
        return_sampling_mask=needs_masks(args, evaluation=evaluation),
    )


def set_status(sample: Any, name: str) -> None:
    """Set the status of a sample by the name that slime's enum has."""
    sample.status = type(sample.status)[name]


def fill(args: Any, sample: Any, generation: Generation, text: str) -> None:
    """Append a generation to the response of a sample, as `Sample.append_response_tokens` does. Set all or nothing.

    `metadata["rollbus"]["weight_versions"]` has the version of each token of the response. `weight_versions`, in which
    slime has one entry for each request, gets one for each version in a row.

    Raises:
        InvalidRequest: log probabilities, rows or masks are missing, or rows do not fit the trainer's model.
    """
    new = [int(token) for token in generation.token_ids]
    done = int(sample.response_length)
    changes: dict[str, Any] = {}
    if new:
        if generation.logprobs is None or (sample.rollout_log_probs is None and done and not _is_masked(sample)):
            allowed = "a log probability for each token of the response"
            raise InvalidRequest(field="rollout_log_probs", problem="are missing", allowed=allowed)
        before = [0.0] * done if sample.rollout_log_probs is None else list(sample.rollout_log_probs)
        mask = [1] * done if sample.loss_mask is None else list(sample.loss_mask)
        changes |= {
            "tokens": [*map(int, generation.request.prompt_token_ids), *new],
            "response": sample.response + text,
            "response_length": done + len(new),
            "loss_mask": mask + [1] * len(new),
            "rollout_log_probs": before + generation.logprobs.tolist(),
            "rollout_routed_experts": _join_rows(args, sample, generation),
            **_join_masks(sample, generation, done),
        }
    versions = generation.weight_versions.tolist()
    changes["weight_versions"] = [*sample.weight_versions, *(str(version) for version, _ in groupby(versions))]
    changes["metadata"] = _metadata(sample, generation, versions, done)
    for name, value in changes.items():
        setattr(sample, name, value)
    info = sample.prefix_cache_info
    info.cached_tokens += generation.cached_tokens or 0
    info.total_prompt_tokens += generation.prompt_len
    set_status(sample, STATUSES[generation.finish_reason])


def _is_masked(sample: Any) -> bool:
    """Return True if no token of the response so far is trained."""
    return sample.loss_mask is not None and not any(sample.loss_mask)


def _metadata(sample: Any, generation: Generation, versions: list[int], done: int) -> dict[str, Any]:
    metadata = dict(sample.metadata or {})
    own = dict(metadata.get("rollbus", {}))
    known = list(own.get("weight_versions", ()))[:done]
    own["weight_versions"] = known + [NOT_SAMPLED] * (done - len(known)) + versions
    own["attempts"] = own.get("attempts", 0) + generation.attempts
    own["workers"] = [*own.get("workers", ()), *generation.worker_ids]
    return {**metadata, "rollbus": own}


def _join_rows(args: Any, sample: Any, generation: Generation) -> Any:
    """Return the rows of all positions of a sample as a tensor, i4[tokens - 1, num_layers, top_k]."""
    import torch

    if not generation.request.return_routed_experts:
        return sample.rollout_routed_experts
    kept, wanted = num_kept_rows(generation), generation.prompt_len - generation.start + len(generation.token_ids) - 1
    if generation.routed_experts is None or kept != wanted:
        raise InvalidRequest(field="routed_experts", problem=f"have {kept} rows", allowed=f"{wanted}, one a position")
    num_experts = getattr(args, "num_experts", None)
    largest = num_experts - 1 if isinstance(num_experts, int) else None
    rows = convert_rows(generation.routed_experts[:kept], ROW_DTYPE, largest)
    shape = (args.num_layers, args.moe_router_topk)
    if rows.shape[1:] != shape:
        raise InvalidRequest(
            field="routed_experts", problem=f"have layers and top-k {rows.shape[1:]}", allowed=f"{shape}"
        )
    if not generation.start:
        return torch.from_numpy(rows)
    first = torch.as_tensor(sample.rollout_routed_experts, dtype=torch.int32)
    return torch.cat([first[: generation.start], torch.from_numpy(rows)])


def _join_masks(sample: Any, generation: Generation, done: int) -> dict[str, Any]:
    """Return the ids from which each token was sampled, in slime's form: all ids, and the offset of each token."""
    if not generation.request.return_sampling_mask:
        return {}
    import torch

    masks = generation.sampling_mask
    if masks is None:
        raise InvalidRequest(field="sampling_mask", problem="is missing", allowed="a mask for each token")
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if (ids is None or offsets is None) and done and not _is_masked(sample):
        raise InvalidRequest(field="rollout_top_p_token_ids", problem="are missing", allowed="ids for each token")
    first = np.zeros(0, np.int32) if ids is None else np.asarray(ids, np.int32)
    ends = np.zeros(done + 1, np.int64) if offsets is None else np.asarray(offsets, np.int64)
    return {
        "rollout_top_p_token_ids": torch.from_numpy(np.concatenate([first, masks.token_ids])),
        "rollout_top_p_token_offsets": torch.from_numpy(
            np.concatenate([ends, ends[-1] + np.cumsum(masks.counts)]).astype(np.int32)
        ),
    }
