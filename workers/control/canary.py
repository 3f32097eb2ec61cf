"""Canaries: the greedy answer to a fixed prompt, which verifies a worker's weights."""

import base64
import uuid
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from ...bus.protocol.fleet.canary import agrees, canary_request, check_expected
from ...bus.protocol.stream.engine_step import RequestStep
from ...schemas.errors import ControlCode, ControlError, InvalidRequest
from ...schemas.limits import MAX_PRIORITY, Recent
from ...schemas.presence import Capabilities
from ...schemas.request import GenerateRequest
from ...schemas.rows import DTYPES, expected_rows
from ...schemas.weights import Canary
from ..requests.in_flight import InFlightRequests
from .staging import Deadline

MAX_KNOWN: Final = 8
"""Maximum stored canaries: a fleet rarely returns to an earlier checkpoint, and then to a recent one."""


def own_request(capabilities: Capabilities) -> GenerateRequest:
    """Return the `canary_request` of the protocol with a fresh cache salt and the highest priority."""
    salt = f"canary {uuid.uuid4().hex}"
    request = canary_request(capabilities)
    if capabilities.sampling_mask:
        # This engine rejects temperature 0 and requests without `top_k`. `top_k` 1 is also greedy.
        request = replace(request, sampling=replace(request.sampling, temperature=1.0, top_k=1))
    return replace(request, request_id="canary", cache_salt=salt, priority=-MAX_PRIORITY, return_sampling_mask=False)


def read_canary(steps: Sequence[RequestStep], request: GenerateRequest, capabilities: Capabilities) -> Canary:
    """Return the canary from the engine's steps of `request`.

    Raises:
        ControlError: `not_verified`: valid weights cannot produce this output.
    """
    token_ids = np.concatenate([step.token_ids for step in steps])
    logprobs = np.concatenate(
        [step.logprobs for step in steps if step.logprobs is not None] or [np.empty(0, np.float32)]
    )
    if len(token_ids) != request.sampling.max_tokens or len(logprobs) != len(token_ids):
        raise _make_unsound(
            f"has {len(token_ids)} tokens and {len(logprobs)} logprobs, not {request.sampling.max_tokens}"
        )
    if not np.isfinite(logprobs).all():
        raise _make_unsound("has logprobs that are not finite, as with NaN in the weights")
    canary = Canary(
        token_ids=tuple(int(token) for token in token_ids),
        # Six digits are a thousand times finer than the tolerance of the comparison.
        logprobs=tuple(round(float(logprob), 6) for logprob in logprobs),
    )
    if (routing := capabilities.routed_experts) is None:
        return canary
    parts = [step.routed_experts for step in steps if step.routed_experts is not None]
    num_rows = sum(map(len, parts))
    if num_rows != expected_rows(request.prompt_len, 0, len(token_ids)):
        raise _make_unsound(f"has a wrong number of rows of routed experts: {num_rows}")
    rows = np.sort(np.concatenate(parts), axis=-1).astype(DTYPES[routing.dtype])
    if not rows.any():
        raise _make_unsound("has routed experts that are all zero, as if the engine had not captured them")
    shape = num_rows, routing.num_layers, routing.top_k
    return replace(canary, routed_experts=base64.b64encode(rows.tobytes()).decode(), shape=shape)


def scoring_request(request: GenerateRequest, canary: Canary) -> GenerateRequest:
    """Return a request with the canary's tokens at the end of the prompt, which scores them.

    Sampled with `top_k` 1, each token of the canary had the logprob 0.
    """
    return replace(
        request,
        # The engine must generate one token after the prompt.
        prompt_token_ids=[*np.asarray(request.prompt_token_ids).tolist(), *canary.token_ids],
        sampling=replace(request.sampling, max_tokens=1, prompt_logprobs=0),
        return_routed_experts=False,
    )


def with_scores(canary: Canary, steps: Sequence[RequestStep]) -> Canary:
    """Return the canary with the log probabilities that its tokens have at the end of a prompt.

    Raises:
        ControlError: `not_verified`: log probabilities are missing or not finite.
    """
    parts = [step.prompt_logprobs.logprobs for step in steps if step.prompt_logprobs is not None]
    logprobs = np.concatenate(parts)[-len(canary.token_ids) :] if parts else np.empty(0, np.float32)
    if len(logprobs) != len(canary.token_ids) or not np.isfinite(logprobs).all():
        raise _make_unsound("lacks finite logprobs at the end of a prompt")
    return replace(canary, logprobs=tuple(round(float(logprob), 6) for logprob in logprobs))


def _make_unsound(problem: str) -> ControlError:
    return ControlError(ControlCode.NOT_VERIFIED, f"the canary {problem}")


class Canaries:
    """Samples canaries, and stores the canaries of earlier checkpoints. Sampling may raise `EngineDead`."""

    def __init__(self, in_flight: InFlightRequests) -> None:
        self._in_flight = in_flight
        # By the digest of the weights, which is never None.
        self._known = Recent[str | None, Canary](MAX_KNOWN)

    async def sample(self, deadline: Deadline) -> Canary:
        """Sample the canary on the engine, which must not be paused.

        Raises:
            ControlError: `not_verified`: valid weights cannot produce this output; `timeout`.
        """
        capabilities = self._in_flight.runner.engine.capabilities
        request = own_request(capabilities)
        canary = read_canary(await self._run(request, deadline), request, capabilities)
        if capabilities.sampling_mask:
            scoring = scoring_request(request, canary)
            return with_scores(canary, await self._run(scoring, deadline))
        return canary

    async def _run(self, request: GenerateRequest, deadline: Deadline) -> list[RequestStep]:
        try:
            return await self._in_flight.run_alone(request, deadline.left_s)
        except ControlError as exc:
            if exc.code is ControlCode.ENGINE_ERROR:
                raise ControlError(ControlCode.NOT_VERIFIED, exc.message) from exc
            raise

    def check_expected(self, expected: Canary | None) -> None:
        """Check that weights of this model can produce `expected`, before any change.

        Raises:
            ControlError: `invalid_command`.
        """
        if expected is None:
            return
        try:
            check_expected(expected, self._in_flight.runner.engine.capabilities)
        except InvalidRequest as exc:
            raise ControlError(ControlCode.INVALID_COMMAND, exc.message) from exc

    def check_agrees(self, canary: Canary, expected: Canary | None, whose: str = "the expected one") -> None:
        """Check that a canary equals the expected canary.

        Args:
            expected: the expected canary. None accepts every canary. A canary without routed experts compares only
                tokens and logprobs.
            whose: name of the expected canary in the error.

        Raises:
            ControlError: `not_verified`, with the difference.
        """
        if expected is None:
            return
        if expected.routed_experts is None:
            canary = replace(canary, routed_experts=None, shape=None)
        why = agrees(canary, expected, dtype=self._in_flight.runner.engine.capabilities.dtype)
        if why is not None:
            raise ControlError(ControlCode.NOT_VERIFIED, f"the canary differs from {whose}: {why}")

    def check_known(self, canary: Canary, content: str | None) -> None:
        """Check that weights produce the same canary as before. Raises the same errors as `check_agrees`.

        Args:
            content: digest of their files. None, if it is unknown, accepts every canary.
        """
        self.check_agrees(canary, self._known.get(content), "the earlier canary of these weights")

    def add(self, content: str | None, canary: Canary) -> None:
        """Add the canary of weights. Remove the oldest canary if there are more than `MAX_KNOWN`."""
        if content is not None:
            self._known[content] = canary

    def remove(self, content: str | None) -> None:
        """Remove the canary of weights because it was wrong."""
        self._known.pop(content, None)
