"""How a synthetic engine is set up, and what is to go wrong in it."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ....schemas.errors import InvalidRequest
from ....schemas.presence import Capabilities, Role, RoutedExpertsInfo
from ....schemas.rows import dtype_for

__all__ = ["SyntheticConfig", "SyntheticFaults"]

LoadFault = Literal["refused", "half_written", "wrong_experts", "hangs"]
"""What comes of a load: nothing is touched; it fails in the middle; it claims success with wrong routing, as vLLM's
reload on a CPU does; it never returns."""


class SyntheticFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong, so that tests can see that it is noticed."""

    load: LoadFault | None = None
    """Of loads of weights from a folder."""
    good_loads: int = 0
    """Loads of weights before `load` comes true."""
    load_s: float = 0.0
    """Seconds that each load of weights takes."""
    start_transfer: bool = False
    """Transfers of weights are refused."""
    loses_loras: bool = False
    """Adapters are gone after new weights."""
    load_lora: bool = False
    """Adapters are refused."""
    unload_lora: bool = False
    """Adapters cannot be unloaded."""
    reset_cache: bool = False
    """The prefix cache can never be reset."""
    preempt_every: int = 0
    """Each request is preempted, and its KV computed anew, after each so many tokens; 0: never."""
    kv_loads: int = 0
    """How many of the next loads of KV fail."""
    dies_of: int | None = None
    """A prompt that begins with this token kills the engine in the step that computes it."""
    dies_silently: bool = False
    """Where it dies of a prompt, the process is killed, without a word to anyone."""


class SyntheticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The make of a synthetic model and the pace of its engine."""

    seed: int = 0
    """The weights, where no checkpoint is given: another seed is another model."""
    step_s: float = 0.0
    """Seconds that one step takes; 0: as fast as it goes."""
    max_num_seqs: int = 256
    """Requests in one step."""
    prefill_step_tokens: int = 0
    """Prompt tokens of one request that one step computes; 0: all of them."""
    prefill_token_s: float = 0.0
    """Seconds that a step takes besides for each prompt token that it computed and did not find in the prefix cache."""
    max_model_len: int = 65_536
    vocab_size: int = 32_000
    eos_token_id: int = 2
    num_layers: int = 4
    top_k: int = 4
    num_experts: int = 16
    """0: a model without experts, which returns no routing."""
    weight_updates: bool = True
    """Weights can be replaced from a checkpoint."""
    weight_transfer: bool = True
    """Weights can come in pieces."""
    max_loras: int = 4
    """Adapters at once."""
    max_lora_rank: int | None = None
    """Largest rank of an adapter; None: any."""
    world_size: int | None = 1
    """Processes that it claims to have; None: it does not say, as earlier releases."""
    version_labels: bool = True
    """It announces that it reads labels of versions; False: it does not, as earlier releases."""
    weight_deltas: bool = True
    """It stages versions of weights; False: it refuses sources in the object store, as on several machines."""
    reports_recomputed_kv: bool = True
    """It says when it has computed KV anew."""
    kv_cache_tokens: int = 4_194_304
    """Room in what it announces as its KV cache. Nothing waits for room: with more tokens than this it is full."""
    sampling_mask: bool = False
    """It makes sampling masks, and as vLLM then refuses requests with a temperature of 0 or without `top_k`."""
    prefix_cache: bool = False
    """Remember prompts, which shows in `cached_tokens`."""
    prefix_cache_tokens: int = 1_048_576
    """Room in the prefix cache; what was not used for longest goes first, and of one prompt its end."""
    role: Role = "both"
    """Other than `both` it has the connector `synthetic`."""
    kv_load_s: float = 0.0
    """Seconds that KV takes to come from another engine. Whoever aborts the request meanwhile kills this one, as vLLM's
    dies of it."""
    die_after_steps: int | None = None
    """Let the engine die after so many steps, as a real one may."""
    faults: SyntheticFaults = SyntheticFaults()
    """What else goes wrong."""

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> "SyntheticConfig":
        """Build from `--engine-args`.

        Raises:
            InvalidRequest: an unknown argument or a value of the wrong type.
        """
        try:
            return msgspec.convert(dict(args), cls)
        except msgspec.ValidationError as exc:
            raise InvalidRequest(
                field="engine_args", problem=f"{exc}", allowed=", ".join(cls.__struct_fields__)
            ) from None

    @property
    def capabilities(self) -> Capabilities:
        """What an engine of this configuration can do."""
        routing = None
        if self.num_experts:
            routing = RoutedExpertsInfo(
                num_layers=self.num_layers,
                top_k=self.top_k,
                num_experts=self.num_experts,
                dtype=dtype_for(self.num_experts),
            )
        return Capabilities(
            engine="synthetic",
            engine_version="1",
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_num_seqs=self.max_num_seqs,
            max_logprobs=20,
            dtype="float32",
            routed_experts=routing,
            priority=True,
            signature="synthetic 1",
            weight_updates=self.weight_updates,
            weight_transfer=self.weight_transfer,
            max_loras=self.max_loras,
            sleep=True,
            role=self.role,
            kv_connector=None if self.role == "both" else "synthetic",
            max_lora_rank=self.max_lora_rank,
            world_size=self.world_size,
            version_labels=self.version_labels,
            sampling_mask=self.sampling_mask,
            weight_deltas=self.weight_deltas,
        )
