"""Commands to workers, their answers, and the ledger that a caller gets: JSON, readable with `nats sub`.

A command is one map with its name under `command`; unknown names and fields are refused, so that a misspelt option is
an error and not a default. Each worker that it concerns answers with `accepted`, may report `progress`, and ends with
exactly one of `applied`, `failed`, `unsupported`, `stale`.
"""

import uuid
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from . import limits
from .acks import Ack, AckError, AckStatus
from .checks import check_float, check_int, check_name, check_request_id, check_subject_token
from .errors import InvalidRequest
from .weights import Canary, Verified, WeightSource

__all__ = [
    "LORA_REGISTER",
    "Abort",
    "Ack",
    "AckError",
    "AckStatus",
    "AnyCommand",
    "Canary",
    "CheckWeights",
    "Command",
    "Drain",
    "Fence",
    "FinishWeightUpdate",
    "FlushCache",
    "InitWeightTransfer",
    "LoadLora",
    "Pause",
    "PauseMode",
    "ReadExperts",
    "ReadRequest",
    "Resume",
    "Sleep",
    "StartWeightUpdate",
    "State",
    "UnloadLora",
    "UpdateWeightChunk",
    "UpdateWeights",
    "Verified",
    "Wake",
    "WeightSource",
    "lora_register",
]

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of the requests in flight: they end at once; they are finished first; they go on after the resume."""
DEFAULT_TIMEOUT_S = 60.0
"""For a command to be carried out where nothing is loaded."""
LOAD_TIMEOUT_S = 600.0
"""For a command that loads weights: a large model from a slow disk."""
READ_TIMEOUT_S = 5.0
"""For a command that only reads what the worker has in memory."""
LORA_REGISTER = "lora:"
"""Begins the name of an adapter's register; the others are pause, weights, flush, sleep."""
Version = Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)]
Label = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What all commands have."""

    sets: ClassVar[str | None] = None
    """The register of the desired state that it sets, see `register`."""

    v: Literal[1] = 1
    """Wire version."""
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """Of the command: repeated under the same id it has no second effect, and gets the same answer."""
    model: str | None = None
    """Whose workers it concerns; None: those of every model."""
    workers: tuple[str, ...] | None = None
    """Which of them, by id; None: all, also those that start later."""
    epoch: int | None = None
    """Of the desired state that it is recorded in. None: not recorded yet, the workers see to it."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """For each worker to carry it out; what holds after that is said in docs/protocol.md."""

    def __post_init__(self) -> None:
        """Check names and ranges."""
        check_request_id("id", self.id)
        if self.model is not None:
            check_name("model", self.model)
        if self.workers is not None:
            if not self.workers:
                raise InvalidRequest(field="workers", problem="is empty", allowed="worker ids, or none at all")
            for worker in self.workers:
                check_subject_token("workers", worker)
        if self.epoch is not None:
            check_int("epoch", self.epoch, 0, 2**53)
        check_float("timeout_s", self.timeout_s, 0, limits.MAX_TIMEOUT_S, above=True)

    @property
    def command(self) -> str:
        """Its name, as it stands under `command`."""
        return str(type(self).__struct_config__.tag)

    @property
    def register(self) -> str | None:
        """The part of the desired state that it sets; None: it is an event, done once by who hears it."""
        return self.sets


def lora_register(name: str) -> str:
    """The register of the desired state for the adapter `name`."""
    return f"{LORA_REGISTER}{name}"


class Pause(Command, frozen=True, kw_only=True, tag_field="command", tag="pause"):
    """Take no more requests; those in flight end, are finished, or are kept for the resume."""

    sets: ClassVar[str | None] = "pause"

    mode: PauseMode = "keep"
    """What becomes of the requests in flight."""
    clear_cache: bool = False
    """Forget the prefix cache too; with `keep`, requests in flight are computed anew when they go on."""


class Resume(Command, frozen=True, kw_only=True, tag_field="command", tag="resume"):
    """Undo `pause` and `drain`."""

    sets: ClassVar[str | None] = "pause"


class Drain(Command, frozen=True, kw_only=True, tag_field="command", tag="drain"):
    """Hand the requests in flight to other workers and take no more, until `resume`."""

    sets: ClassVar[str | None] = "pause"


class FlushCache(Command, frozen=True, kw_only=True, tag_field="command", tag="flush_cache"):
    """Forget the prefix cache."""

    sets: ClassVar[str | None] = "flush"

    preempt: bool = False
    """Also what requests in flight have cached, which are then computed anew; else those make the command fail."""


class Sleep(Command, frozen=True, kw_only=True, tag_field="command", tag="sleep"):
    """Give up the memory of an idle engine."""

    sets: ClassVar[str | None] = "sleep"

    level: Literal[1, 2] = 1
    """1 keeps the weights in the machine's memory, 2 drops them."""


class Wake(Command, frozen=True, kw_only=True, tag_field="command", tag="wake"):
    """Undo `sleep`."""

    sets: ClassVar[str | None] = "sleep"


class CheckWeights(Command, frozen=True, kw_only=True, tag_field="command", tag="check_weights"):
    """Say whether `update_weights` with this source could be carried out; nothing is touched."""

    source: WeightSource
    """Of weights."""
    timeout_s: float = LOAD_TIMEOUT_S


class UpdateWeights(Command, frozen=True, kw_only=True, tag_field="command", tag="update_weights"):
    """Replace the weights."""

    sets: ClassVar[str | None] = "weights"

    version: Version
    """Of the new weights; every token sampled from them bears it."""
    source: WeightSource
    """Where they are."""
    mode: PauseMode = "keep"
    """What becomes of the requests in flight while they are loaded."""
    clear_cache: bool | None = None
    """Forget the prefix cache; None: unless `mode` is `keep`. New requests never find what older weights cached."""
    allow_rollback: bool = False
    """The version may be older than the present one, or the same with another source."""
    expected_canary: Canary | None = None
    """What the trainer's own copy of the weights gives."""
    timeout_s: float = LOAD_TIMEOUT_S
    label: Label | None = None
    """What the trainer calls this version, for example `step-42`; kept with the desired state."""


class _LoraCommand(Command, frozen=True, kw_only=True):
    """What commands on one adapter have."""

    name: str

    def __post_init__(self) -> None:
        """Check the name too."""
        Command.__post_init__(self)
        check_name("name", self.name)

    @property
    def register(self) -> str:
        """One for each adapter."""
        return lora_register(self.name)


class LoadLora(_LoraCommand, frozen=True, kw_only=True, tag_field="command", tag="load_lora"):
    """Load a LoRA adapter, or replace the one of the same name."""

    name: str
    """What requests call it."""
    source: WeightSource
    """Where it is."""
    version: Version = 0
    """Of the adapter; every token sampled with it bears it."""
    timeout_s: float = LOAD_TIMEOUT_S


class UnloadLora(_LoraCommand, frozen=True, kw_only=True, tag_field="command", tag="unload_lora"):
    """Unload a LoRA adapter; one that is not there is fine. Requests in flight that use it are ended."""

    name: str
    """What requests call it."""


class Abort(Command, frozen=True, kw_only=True, tag_field="command", tag="abort"):
    """End requests in flight, of whichever client."""

    request_ids: Annotated[tuple[str, ...], Meta(min_length=1, max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """As their clients named them."""


class State(Command, frozen=True, kw_only=True, tag_field="command", tag="state"):
    """Say how the worker is; the answer carries what it announces of itself."""


class ReadExperts(Command, frozen=True, kw_only=True, tag_field="command", tag="read_experts"):
    """Say how often the router chose each expert; only workers with `Capabilities.telemetry_reads` know it."""

    since: Annotated[int, Meta(ge=0, le=limits.MAX_COUNT)] = 0
    """Of `window` `recent`: the number of the interval before the first that is asked for, which is Unix time / 5 s; 0:
    all that are kept, two minutes."""
    window: Literal["recent", "versions"] = "recent"
    """`recent`: the last intervals. `versions`: everything counted under each of the last 8 versions of the weights."""
    timeout_s: float = READ_TIMEOUT_S


class ReadRequest(Command, frozen=True, kw_only=True, tag_field="command", tag="read_request"):
    """Tell what became of a request here; only workers with `Capabilities.telemetry_reads` know it."""

    request_id: str
    """As its client named it."""
    timeout_s: float = READ_TIMEOUT_S

    def __post_init__(self) -> None:
        """Check the request's id too."""
        Command.__post_init__(self)
        check_request_id("request_id", self.request_id)


class Fence(Command, frozen=True, kw_only=True, tag_field="command", tag="fence"):
    """Serve nothing until the next good update or a restart: the fleet disagrees about this worker's weights."""

    reason: str = "a controller fenced it"
    """For people; ends up in `last_error`."""


class InitWeightTransfer(Command, frozen=True, kw_only=True, tag_field="command", tag="init_weight_transfer"):
    """Pass `info` to the engine's `init_weight_transfer_engine`."""

    info: dict[str, Any]
    """As the engine's transfer backend takes it."""


class StartWeightUpdate(Command, frozen=True, kw_only=True, tag_field="command", tag="start_weight_update"):
    """Hold the requests in flight and begin to take weights from the transfer engine."""

    mode: PauseMode = "keep"
    """What becomes of the requests in flight."""


class UpdateWeightChunk(Command, frozen=True, kw_only=True, tag_field="command", tag="update_weight_chunk"):
    """Pass `info` to the engine's `update_weights`."""

    info: dict[str, Any]
    """As the engine's transfer backend takes it."""


class FinishWeightUpdate(Command, frozen=True, kw_only=True, tag_field="command", tag="finish_weight_update"):
    """End an update by the transfer engine: verify, stamp the version, go on. A late joiner cannot repeat it."""

    sets: ClassVar[str | None] = "weights"

    version: Version
    """Of the new weights."""
    allow_rollback: bool = False
    """The version may be older than the present one, or the same as that of a checkpoint."""
    timeout_s: float = LOAD_TIMEOUT_S
    label: Label | None = None
    """As in `update_weights`."""


AnyCommand = (
    Pause
    | Resume
    | Drain
    | FlushCache
    | Sleep
    | Wake
    | CheckWeights
    | UpdateWeights
    | LoadLora
    | UnloadLora
    | Abort
    | State
    | ReadExperts
    | ReadRequest
    | Fence
    | InitWeightTransfer
    | StartWeightUpdate
    | UpdateWeightChunk
    | FinishWeightUpdate
)
"""Whatever may come as a command."""
