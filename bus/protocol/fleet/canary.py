"""The request of a canary, and the comparison of canaries: it shows if copies of the weights are equal."""

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ....schemas.acks import Ack
from ....schemas.errors import InvalidRequest, RemoteProtocolError
from ....schemas.presence import Capabilities
from ....schemas.request import GenerateRequest
from ....schemas.rows import DTYPES, Rows, expected_rows
from ....schemas.sampling import SamplingParams
from ....schemas.weights import Canary

PROMPT_TOKENS: Final = 24
"""Length of the prompt. With the generated tokens, it has enough rows to reach a few wrong experts among hundreds."""
NUM_TOKENS: Final = 8
"""The number of generated tokens: decoding uses other kernels than the prompt does."""
STRIDE: Final = 7919
"""A prime number that spreads the prompt over any vocabulary."""
EXACT_LOGPROBS: Final = 1e-3
"""The allowed difference between workers that compute in float32: ten times that of prefill and decode kernels."""
LOOSE_LOGPROBS: Final = 0.25
"""The allowed difference in a narrower dtype: a wrong model differs by whole units, rounding by hundredths."""
LOOSE_CHOICES: Final = 0.9
"""The share of expert choices that must agree in a narrower dtype. Rounding changes 1 in 40 rows on a small model, a
broken reload changes 1 in 5.
"""
MAX_CANDIDATES: Final = 32
"""Canaries that are tried as the majority's canary. Each is compared with all others. If there is a majority, a random
canary belongs to it with a probability of at least one half.
"""


def canary_request(capabilities: Capabilities) -> GenerateRequest:
    """Return the request that identifies the weights of a model: a fixed prompt with greedy generation.

    To compute an `expected_canary`, run the prompt through your own copy of the weights. Generate `sampling.max_tokens`
    tokens, each time the most likely token, also beyond an end-of-sequence token. For each token, record the logarithm
    of its softmax over all logits.

    Args:
        capabilities: those that a worker of the model publishes.
    """
    num_tokens = min(NUM_TOKENS, capabilities.max_model_len // 2)
    prompt_len = min(PROMPT_TOKENS, capabilities.max_model_len - num_tokens)
    return GenerateRequest(
        prompt_token_ids=[(number + 1) * STRIDE % capabilities.vocab_size for number in range(prompt_len)],
        sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0),
    )


def check_expected(canary: Canary, capabilities: Capabilities) -> None:
    """Check that the weights of this model can produce an `expected_canary`, before the load and not after it.

    Raises:
        InvalidRequest: it answers another request, or its routed experts do not fit the model.
    """
    request = canary_request(capabilities)
    num_tokens = request.sampling.max_tokens
    if not len(canary.token_ids) == len(canary.logprobs) == num_tokens:
        raise InvalidRequest(
            "expected_canary",
            f"has {len(canary.token_ids)} tokens and {len(canary.logprobs)} logprobs",
            f"{num_tokens} of each, as rollbus.canary_request has it",
        )
    try:
        rows = canary_rows(canary)
    except RemoteProtocolError as exc:
        raise InvalidRequest("expected_canary", f"is wrong: {exc}", "the canary of an ack") from None
    if rows is None:
        return
    routing = capabilities.routed_experts
    num_rows = expected_rows(request.prompt_len, 0, num_tokens)
    expected = None if routing is None else (num_rows, routing.num_layers, routing.top_k)
    if rows.shape != expected:
        raise InvalidRequest(
            "expected_canary",
            f"has routed experts of shape {list(rows.shape)}",
            "none" if expected is None else f"{list(expected)}, or none",
        )


def agrees(a: Canary, b: Canary, *, dtype: str) -> str | None:
    """Compare the canaries of two workers. Return None if they agree, else the reason for people.

    In float32, tokens and expert sets must be equal and logprobs nearly equal. In a narrower dtype, rounding may decide
    between two tokens. The tokens after the first different token are not comparable.

    Args:
        dtype: the dtype of the weights of both workers.
    """
    for canary in (a, b):
        if not canary.token_ids or len(canary.token_ids) != len(canary.logprobs):
            return f"a canary has {len(canary.token_ids)} tokens and {len(canary.logprobs)} logprobs"
    if len(a.token_ids) != len(b.token_ids):
        return f"the canaries have {len(a.token_ids)} and {len(b.token_ids)} tokens"
    is_exact = dtype == "float32"
    num_same = count_same(a.token_ids, b.token_ids)
    if is_exact and num_same < len(a.token_ids):
        return f"the tokens differ from number {num_same} on"
    # If two tokens are nearly tied, so are their logprobs. So the logprobs of the first different token must agree.
    compared = num_same + 1
    difference = float(np.max(np.abs(np.subtract(a.logprobs[:compared], b.logprobs[:compared]))))
    allowed = EXACT_LOGPROBS if is_exact else LOOSE_LOGPROBS
    # This form rejects NaN.
    if not difference <= allowed:
        return f"logprobs differ by {difference:.3g}, allowed: {allowed:g}"
    return _compare_rows(a, b, num_same, 1.0 if is_exact else LOOSE_CHOICES)


def count_same(a: npt.ArrayLike, b: npt.ArrayLike) -> int:
    """Return the number of equal tokens before the first different one, of two runs with as many tokens."""
    differing = np.flatnonzero(np.not_equal(a, b))
    return int(differing[0]) if len(differing) else len(np.asarray(a))


def _compare_rows(a: Canary, b: Canary, num_same: int, needed: float) -> str | None:
    try:
        rows_a, rows_b = canary_rows(a), canary_rows(b)
    except RemoteProtocolError as exc:
        return str(exc)
    if rows_a is None or rows_b is None:
        return None if rows_a is rows_b else "only one of the two canaries has routed experts"
    if rows_a.shape != rows_b.shape:
        return f"the routed experts have the shapes {rows_a.shape} and {rows_b.shape}"
    # The last generated token has no row. Rows after a different token belong to another text.
    prompt_len = len(rows_a) - len(a.token_ids) + 1
    comparable = prompt_len + num_same
    share = measure_agreement(rows_a[:comparable], rows_b[:comparable])
    if share < needed:
        return f"{share:.1%} of the expert choices agree, needed: {needed:.0%}"
    return None


def measure_agreement(a: Rows, b: Rows) -> float:
    """Return the share of the experts chosen in `a`, by position and layer, that `b` also chose there."""
    in_both: npt.NDArray[np.bool_] = np.zeros(a.shape, np.bool_)
    for choice in range(b.shape[-1]):  # a loop: all choices at once would need memory with the square of top-k
        in_both |= a == b[..., choice, None]
    return float(in_both.mean()) if in_both.size else 1.0


def canary_rows(canary: Canary) -> Rows | None:
    """Return the routed experts of a canary, u1|u2[num_rows, num_layers, top_k]; None if it has none.

    Raises:
        RemoteProtocolError: they do not decode to their shape.
    """
    if canary.routed_experts is None and canary.shape is None:
        return None
    is_sound = canary.shape is not None and min(canary.shape) > 0 and canary.shape[0] >= len(canary.token_ids)
    if canary.routed_experts is None or canary.shape is None or not is_sound:
        raise RemoteProtocolError(f"a canary's routed experts have shape {canary.shape}")
    try:
        data = base64.b64decode(canary.routed_experts, validate=True)
    except ValueError as exc:  # also for text that is not ASCII
        raise RemoteProtocolError(f"a canary's routed experts are not valid base64: {exc}") from None
    size = math.prod(canary.shape)
    for dtype in DTYPES.values():
        if len(data) == size * dtype.itemsize:
            return np.frombuffer(data, dtype).reshape(canary.shape)
    raise RemoteProtocolError(f"a canary has {len(data)} bytes of routed experts for shape {canary.shape}")


def dissenters(acks: Mapping[str, Ack], dtypes: Mapping[str, str]) -> dict[str, str]:
    """Return workers whose canary differs from the majority of their kind, with the reason; without a majority, all.

    Args:
        acks: the acks by worker; acks without a canary are ignored.
        dtypes: the dtypes of the weights, by worker. Workers of one kind have the same engine signature and dtype.
    """
    kinds: dict[tuple[str | None, str], dict[str, Canary]] = {}
    for worker, ack in sorted(acks.items()):
        if ack.canary is not None:
            kinds.setdefault((ack.signature, dtypes.get(worker, "")), {})[worker] = ack.canary
    found: dict[str, str] = {}
    for (_, dtype), canaries in kinds.items():
        found |= _find_minority(canaries, dtype)
    return found


def _find_minority(canaries: Mapping[str, Canary], dtype: str) -> dict[str, str]:
    # The most frequent first: workers on the same machine mostly have identical canaries.
    candidates = [canary for canary, _ in Counter(canaries.values()).most_common(MAX_CANDIDATES)]
    for candidate in candidates:
        others = {worker: canary for worker, canary in canaries.items() if canary != candidate}
        problems = {worker: agrees(candidate, canary, dtype=dtype) for worker, canary in others.items()}
        differing = {worker: problem for worker, problem in problems.items() if problem is not None}
        if 2 * len(differing) < len(canaries):
            return {worker: f"its canary differs from the majority's: {why}" for worker, why in differing.items()}
    return dict.fromkeys(canaries, f"the canaries of {len(canaries)} workers disagree, and there is no majority")
