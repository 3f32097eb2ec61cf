"""The configuration of a synthetic engine, and the faults that it simulates."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ....schemas.errors import InvalidRequest
from ....schemas.presence import Capabilities, RoutedExpertsInfo, WorkerRole
from ....schemas.rows import dtype_for

LoadFault = Literal["refused", "half_written", "wrong_experts", "hangs"]
"""Fault of a load of weights.

- `refused`: the load fails and changes nothing.
- `half_written`: the load fails in the middle.
- `wrong_experts`: the load reports success, but the routed experts are wrong, as after vLLM's reload on a CPU.
- `hangs`: the load never returns.
"""


class SyntheticFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of the engine. Tests check that rollbus detects them."""

    load: LoadFault | None = None
    """Fault of loads of weights from a folder; None: they succeed."""
    good_loads: int = 0
    """Number of successful loads of weights before the fault `load` occurs."""
    load_s: float = 0.0
    """Seconds that each load of weights takes."""
    start_transfer: bool = False
    """True: the engine rejects the start of a weight transfer."""
    transfer_hangs: bool = False
    """True: a part of a weight transfer never arrives, and the engine executes no later call of the transfer, as a GPU
    that waits for a peer in NCCL."""
    loses_loras: bool = False
    """True: new weights unload all adapters."""
    load_lora: bool = False
    """True: the engine rejects adapters."""
    unload_lora: bool = False
    """True: the engine fails to unload adapters."""
    reset_cache: bool = False
    """True: a reset of the prefix cache always fails."""
    preempt_every: int = 0
    """Number of tokens after which a request is preempted and its KV recomputed, repeatedly; 0: never."""
    kv_loads: int = 0
    """Number of the next loads of KV that fail."""
    memory_file: str | None = None
    """Path of a file. While the file exists, another process uses the memory that the engine needs to wake or to start.
    The file contains the pid of that process."""
    dies_of: int | None = None
    """First token of a prompt that kills the engine in the step that completes this prompt; None: no prompt does."""


class SyntheticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of a synthetic model, and the speed of its engine."""

    seed: int = 0
    """Seed of the weights if there is no checkpoint. Another seed is another model."""
    step_s: float = 0.0
    """Seconds of one step; 0: as fast as possible."""
    max_num_seqs: int = 256
    """Maximum number of requests in one step."""
    prefill_step_tokens: int = 0
    """Maximum number of prompt tokens of one request in one step; 0: all."""
    prefill_token_s: float = 0.0
    """Additional seconds of a step for each prompt token that it computed and did not find in the prefix cache."""
    max_model_len: int = 65_536
    """Maximum number of tokens of a prompt and its completion."""
    vocab_size: int = 32_000
    """Number of token ids."""
    eos_token_id: int = 2
    """Token id that ends a completion unless the request ignores it."""
    num_layers: int = 4
    """Number of layers with experts."""
    top_k: int = 4
    """Number of experts that the router chooses for a token in each layer."""
    num_experts: int = 16
    """Number of experts of each layer; 0: a model without experts, which returns no routed experts."""
    weight_updates: bool = True
    """True if the weights can be replaced from a checkpoint."""
    weight_transfer: bool = True
    """True if the weights can be replaced by a weight transfer."""
    max_loras: int = 4
    """Maximum number of loaded adapters."""
    max_lora_rank: int | None = None
    """Largest rank of an adapter; None: any."""
    world_size: int | None = 1
    """Number of processes that the capabilities report; None: not reported, as in earlier releases."""
    version_labels: bool = True
    """True if the capabilities report that commands with a label are decoded; False: as in earlier releases."""
    weight_digests: bool = True
    """True if the capabilities report that digests of weights are computed and decoded; False: as in earlier
    releases."""
    weight_deltas: bool = True
    """True if the engine stages weight versions.

    False: it rejects sources in the object store, like an engine on several machines.
    """
    reports_recomputed_kv: bool = True
    """True if the engine's steps state whether their KV was recomputed."""
    kv_cache_tokens: int = 4_194_304
    """Tokens that fit into the reported KV cache. Requests never wait for space: with more tokens, it is full."""
    sampling_mask: bool = False
    """True if the engine returns sampling masks.

    Like vLLM, it then rejects requests with a temperature of 0 or without `top_k`.
    """
    prefix_cache: bool = False
    """True if the engine caches prompts and reports `cached_tokens`."""
    prefix_cache_tokens: int = 1_048_576
    """Tokens that fit into the prefix cache. It evicts the least recently used blocks first, from a prompt's end."""
    role: WorkerRole = "both"
    """Role of the engine. With a role other than `both`, the engine has the KV connector `synthetic`."""
    kv_load_s: float = 0.0
    """Seconds of a KV transfer from another engine. An abort of the request during the transfer kills the engine, as it
    kills vLLM's engine."""
    die_after_steps: int | None = None
    """Number of steps after which the engine dies; None: it does not."""
    faults: SyntheticFaults = SyntheticFaults()
    """Other faults of the engine."""

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> "SyntheticConfig":
        """Build from `--engine-args`.

        Raises:
            InvalidRequest: an unknown argument or a value of the wrong type.
        """
        try:
            return msgspec.convert(dict(args), cls)
        except msgspec.ValidationError as exc:
            raise InvalidRequest("engine_args", f"{exc}", ", ".join(cls.__struct_fields__)) from None

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of an engine with this configuration."""
        routing = None
        if self.num_experts:
            routing = RoutedExpertsInfo(
                num_layers=self.num_layers,
                top_k=self.top_k,
                num_experts=self.num_experts,
                dtype=dtype_for(self.num_experts),
            )
        same: dict[str, Any] = {
            name: getattr(self, name) for name in Capabilities.__struct_fields__ if name in self.__struct_fields__
        }
        return Capabilities(
            engine="synthetic",
            engine_version="1",
            max_logprobs=20,
            dtype="float32",
            routed_experts=routing,
            priority=True,
            signature="synthetic 1",
            sleep=True,
            kv_connector=None if self.role == "both" else "synthetic",
            **same,
        )
