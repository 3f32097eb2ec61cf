"""What an operator sets for the HTTP service."""

from dataclasses import dataclass
from pathlib import Path

from ...schemas.limits import DEFAULT_PREFILL_MIN_TOKENS, DEFAULT_TIMEOUT_S

__all__ = ["LOOPBACK", "Settings"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts that nobody else can reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator sets; the defaults let in this machine only."""

    token: str | None = None
    """Bearer token of the data routes; None: none is asked for."""
    admin_token: str | None = None
    """Bearer token of the admin routes, which change the fleet; None: none is asked for."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names in lower case by which clients reach the service, beside `localhost` and addresses. Others are answered 403
    unless both tokens are set."""
    max_body_bytes: int = 32 << 20
    """A larger body is answered 413: a million token ids in JSON are about 8 MiB."""
    max_in_flight: int = 1024
    """Requests for tokens at a time; one more is answered 429."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Until a request for tokens fails, where it does not say."""
    returns_tokens: bool = False
    """Every answer has token ids and log probabilities, also if the request does not ask for them."""
    client_timeout_s: float = 300.0
    """For a client that is waited for: until its body is there, and until it has read each piece of its answer. A
    trainer that blocks its loop for a step of training comes back; one that does not would hold its answer's memory."""
    otel: bool = False
    """Spans of requests are exported, as the variables `OTEL_*` say."""
    trusts_traceparent: bool = False
    """The flags of a client's `traceparent` count: it may have its request sampled. Otherwise they are cleared."""
    prefill_min_tokens: int = DEFAULT_PREFILL_MIN_TOKENS
    """Of prompts that go to a prefill worker first, where the fleet has any."""
    tool_call_parser: str | None = None
    """vLLM's name of the parser of tool calls; None: tools are refused."""
    reasoning_parser: str | None = None
    """vLLM's name of the parser of reasoning; None: it stays in the content."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; None: that of a worker on this machine."""
