"""The HTTP service, and its settings. The declarations of subcommands import them, so this file imports no package."""

from dataclasses import dataclass
from pathlib import Path

from ...schemas.limits import DEFAULT_PREFILL_MIN_TOKENS, DEFAULT_TIMEOUT_S

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts that only programs on this machine can reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the HTTP service. By default, requests need no token and must name `localhost` or an address."""

    token: str | None = None
    """Bearer token of the data routes; None if they require no token."""
    admin_token: str | None = None
    """Bearer token of the admin routes, which change the fleet; None if they require no token."""
    allowed_hosts: frozenset[str] = frozenset()
    """Host names in lower case by which clients reach the service, in addition to `localhost` and addresses. Requests
    with other host names are answered 403 unless both tokens are set."""
    max_body_bytes: int = 32 << 20
    """Limit for a request body. A larger body is answered 413. A million token ids in JSON have about 8 MiB."""
    max_in_flight: int = 1024
    """Limit on open token requests. Further requests are answered 429."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Default timeout of a token request in seconds."""
    max_wait_s: float = 60.0
    """Seconds for which a request waits before its first byte while no worker serves its model, although one starts,
    updates its weights or is paused. Then it is answered 503. Longer than the restart of most engines."""
    returns_tokens: bool = False
    """If True, every answer has token ids and log probabilities, even if the request does not ask for them."""
    routed_experts_npy: bool = False
    """If True, choices of all token routes have their routed experts as vLLM's base64 `.npy` string, as from a vLLM
    server with `--enable-return-routed-experts`. A request may choose otherwise."""
    client_timeout_s: float = 300.0
    """Seconds for a client to send its body, and to read each piece of its answer. This is long enough for a trainer
    that blocks its event loop during a training step. A client that never reads would hold its answer's memory."""
    stop_timeout_s: float = 5.0
    """Seconds that open requests have to finish when the service stops. Then they are aborted."""
    otel: bool = False
    """If True, spans of requests are exported as the variables `OTEL_*` configure."""
    trusts_traceparent: bool = False
    """If True, a client may have its request sampled by the flags of its `traceparent`. Otherwise they are cleared."""
    prefill_min_tokens: int = DEFAULT_PREFILL_MIN_TOKENS
    """Minimum number of prompt tokens for which a request goes to a prefill worker first, if the fleet has any."""
    tool_call_parser: str | None = None
    """vLLM's name of the tool call parser; None if requests with tools are rejected."""
    reasoning_parser: str | None = None
    """vLLM's name of the reasoning parser; None if reasoning stays in the content."""
    default_model: str | None = None
    """Model or adapter of requests that name none. None: the only known model of the fleet."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; None for the model folder of a worker on this machine."""
