"""What control routes read: our own names, and those of vLLM and prime-rl, which the same routes take.

The names of fields are those of `rollbus.Fleet`'s options. One struct for each route says all that it may be given;
which of its fields exclude each other is checked where they are used.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....schemas import limits
from ....schemas.control import PauseMode
from ....schemas.weights import Canary

__all__ = [
    "AbortBody",
    "AddLoraBody",
    "DrainBody",
    "FinishTransferBody",
    "FlushBody",
    "InitTransferBody",
    "LoadLoraBody",
    "PauseBody",
    "ResumeBody",
    "SendBody",
    "SleepBody",
    "StartTransferBody",
    "UnloadLoraBody",
    "UpdateBody",
    "WakeBody",
]

Version = Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)]
Seconds = Annotated[float, Meta(gt=0, le=limits.MAX_TIMEOUT_S)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Workers = Annotated[tuple[str, ...], Meta(min_length=1, max_length=limits.MAX_WORKER_OVERRIDES)]


class SendBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom a command concerns, and how long it may take."""

    model: Name | None = None
    """Whose workers; None: those of every model, of which some commands allow only one."""
    workers: Workers | None = None
    """Which of them, by id; None: all, also those that start later."""
    timeout_s: Seconds | None = None
    """For each worker to carry it out; None: 60, or 600 for what loads weights."""


class PauseBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take no more requests."""

    mode: PauseMode | None = None
    """What becomes of requests in flight; None: `keep`."""
    clear_cache: bool | None = None
    """Forget the prefix cache too. None: no; on vLLM's own route `/pause`, unless `mode` is `keep`."""
    wait_for_inflight_requests: bool | None = None
    """vLLM's older name of `mode=wait`."""
    is_async: bool = msgspec.field(default=False, name="async")
    """Answer 202 with an operation's id as soon as it is recorded; so does the header `Prefer: respond-async`."""


class ResumeBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take requests again."""


class DrainBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hand the requests in flight to other workers and take no more, until `resume`."""

    workers: Workers
    """Which, by id: there is no default, as a drain of all leaves nobody to hand requests to."""


class FlushBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Forget the prefix cache."""

    preempt: bool | None = None
    """Also what requests in flight have cached; else those make it fail."""
    reset_running_requests: bool | None = None
    """vLLM's name of `preempt`."""
    reset_external: bool = False
    """vLLM's; there are no external caches here, so that only false is allowed."""


class UpdateBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replace the weights: exactly one of the sources."""

    path: Path | None = None
    """A folder on the workers' machines, below one of their weight roots."""
    objects: Path | None = None
    """`<bucket>/<prefix>` in NATS's object store."""
    weight_dir: Path | None = None
    """prime-rl's name of `path`."""
    update_info: dict[str, Any] | None = None
    """vLLM's: a part of the weights, as the engines' transfer backend takes it."""
    version: Version | None = None
    """Of the new weights; None: one more than the newest applied."""
    weight_version: Name | None = None
    """Dynamo's and vLLM's: any text. A number is the version; another text is kept as its label, for `/weight_info`."""
    mode: PauseMode = "keep"
    """What becomes of requests in flight meanwhile."""
    clear_cache: bool | None = None
    """Forget the prefix cache; None: unless `mode` is `keep`. New requests never find what older weights cached."""
    allow_rollback: bool = False
    """The version may be older than the present one, or the same with another source."""
    expected_canary: Canary | None = None
    """What the trainer's own copy of the weights gives."""
    min_staged: Annotated[int, Meta(ge=1)] | None = None
    """Switch as soon as so many workers have staged the weights; None: all must have. The others are not waited for."""
    skip_prefix_cache_reset: bool = False
    """prime-rl's; without effect, as new requests never find what older weights cached."""


class LoadLoraBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load a LoRA adapter, or replace the one of the same name."""

    name: Name | None = None
    """What requests call it."""
    lora_name: Name | None = None
    """vLLM's name of `name`."""
    path: Path | None = None
    """A folder on the workers' machines, below one of their weight roots."""
    objects: Path | None = None
    """`<bucket>/<prefix>` in NATS's object store."""
    lora_path: Path | None = None
    """vLLM's name of `path`."""
    version: Version | None = None
    """Of the adapter; None: one more than what is recorded."""
    load_inplace: bool | None = None
    """vLLM's: whether one of that name may be there already. None: it may; on vLLM's own route `/v1/...`, not."""
    is_3d_lora_weight: bool = False
    """vLLM's; only false is allowed."""


class LoraSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an adapter is."""

    uri: Path
    """`file:///FOLDER` or `/FOLDER` on the workers' machines, or `objects:<bucket>/<prefix>` in NATS's object store."""


class AddLoraBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dynamo's: load a LoRA adapter, or replace the one of the same name."""

    lora_name: Name
    """What requests call it."""
    source: LoraSource
    """Where it is."""
    load_inplace: bool = True
    """Whether one of that name may be there already."""


class UnloadLoraBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unload a LoRA adapter; one that is not there is fine."""

    name: Name | None = None
    """What requests call it."""
    lora_name: Name | None = None
    """vLLM's name of `name`."""
    lora_int_id: int | None = None
    """vLLM's; without effect."""


class AbortBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End requests in flight, of whichever client."""

    request_ids: Annotated[tuple[str, ...], Meta(min_length=1, max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """As answers have them, with `chatcmpl-` or `cmpl-` or without. All: pause with `mode=abort`, and resume."""


class SleepBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Have engines give up their memory; requests in flight go back to the queue."""

    level: Literal[1, 2] = 1
    """1 keeps the weights in the machine's memory, 2 drops them."""
    mode: PauseMode = "abort"
    """vLLM's; only `abort` is allowed: to let requests end, pause with `mode=wait` first."""


class WakeBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Have engines take their memory back."""

    tags: tuple[str, ...] | None = None
    """vLLM's; only null is allowed: all of it comes back."""


class InitTransferBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set up the engines' own transfer of weights, as vLLM's route does."""

    init_info: dict[str, Any]
    """As the engines' transfer backend takes it. Without `workers`, each worker gets its own `rank_offset`: that
    which is given here, plus what `/get_world_size` says of the worker."""


class StartTransferBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Begin to take weights from the transfer engine."""

    mode: PauseMode = "keep"
    """What becomes of requests in flight meanwhile."""
    is_checkpoint_format: bool = True
    """Of earlier releases of vLLM; only true is allowed: the tensors are named and shaped as in a checkpoint."""


class FinishTransferBody(SendBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Use the weights that came."""

    version: Version | None = None
    """Of the new weights; None: one more than the newest applied."""
    weight_version: Name | None = None
    """vLLM's: any text. A number is the version; another text is kept as its label, for `/weight_info`."""
    allow_rollback: bool = False
    """The version may be older than the present one."""
