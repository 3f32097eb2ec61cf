"""Requests with deterministic tokens, for tests that only need some tokens."""

from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams

PROMPT_LEN = 3


def greedy(prompt: int, max_tokens: int, **fields: object) -> GenerateRequest:
    """Return a greedy request of exactly `max_tokens`, whose prompt begins with `prompt`."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=[prompt, 2, 3], sampling=sampling, **fields)  # type: ignore[arg-type]


def sized(prompt_len: int = 5, max_tokens: int = 8, **fields: object) -> GenerateRequest:
    """Return a greedy request of exactly `max_tokens` with a prompt of this length."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=range(prompt_len), sampling=sampling, **fields)  # type: ignore[arg-type]


def endless(request_id: str = "endless", **fields: object) -> GenerateRequest:
    """Return a request that runs for hours unless it is aborted."""
    return greedy(1, 4_000_000, request_id=request_id, **fields)


def short(request_id: str, **fields: object) -> GenerateRequest:
    """Return a request for three tokens."""
    return greedy(1, 3, request_id=request_id, **fields)
