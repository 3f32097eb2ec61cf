"""What a worker says about itself: JSON, readable with `nats sub`."""

import enum
from typing import Literal

import msgspec

__all__ = ["Capabilities", "RoutedExpertsInfo", "WorkerPresence", "WorkerState"]


class RoutedExpertsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the routing that a worker's model returns."""

    num_layers: int
    """Layers in a row; layers without experts are included as zeros where the engine does so."""
    top_k: int
    """Experts chosen per token and layer."""
    num_experts: int
    """Experts per layer."""
    dtype: Literal["u1", "<u2"]
    """One dtype per model: u1 up to 256 experts, else <u2."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do; requests are checked against it before the engine sees them."""

    engine: str
    """`vllm` or `synthetic`."""
    engine_version: str
    max_model_len: int
    """Prompt and generated tokens together."""
    vocab_size: int
    """Token ids are 0 to vocab_size - 1."""
    max_num_seqs: int
    """Requests that run at once; more wait inside the engine."""
    max_logprobs: int
    """Largest `sampling.logprobs` and `sampling.prompt_logprobs`."""
    dtype: str
    """Of the weights, for example `bfloat16`."""
    routed_experts: RoutedExpertsInfo | None = None
    """None: this model returns no routing."""
    logprobs_mode: str = "processed_logprobs"
    """Logprobs are the sampler's: after temperature, penalties and truncation (vLLM's word for it)."""
    priority: bool = False
    """The engine's scheduler honours `priority`."""
    extra: tuple[str, ...] = ()
    """Names that `sampling.extra` may use."""


class WorkerState(enum.StrEnum):
    """What a worker is doing."""

    STARTING = "starting"
    """The engine is loading or warming up; requests are not taken."""
    SERVING = "serving"
    DRAINING = "draining"
    """No new requests are taken; open ones are finished."""
    FAILED = "failed"
    """The engine died; the process is about to exit."""


class WorkerPresence(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's periodic message about itself."""

    v: int = 1
    worker: str
    """Its id, unique in the fleet."""
    incarnation: str
    """Changes with each start of the worker; frames of another incarnation belong to another life."""
    model: str
    state: WorkerState
    weight_version: int
    in_flight: int
    """Requests that the worker has admitted and not ended."""
    free_slots: int
    """Requests that it would start at once."""
    uptime_s: float
    lease_s: float
    """How long this message is good for."""
    capabilities: Capabilities | None = None
    """None while the engine is starting."""
    last_error: str | None = None
