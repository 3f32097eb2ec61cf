"""Commands to workers, and the desired state that they make, as JSON that is readable with `nats sub`.

A command is one map with its name under `command`. A worker rejects unknown names and fields, so a misspelt option
causes an error instead of a default. Each worker that a command names acks it: first `accepted`, then optionally
`progress`, and finally exactly one of `applied`, `failed`, `unsupported`, `stale`.

The desired state of a fleet's model is one JSON value in a NATS KV bucket. It consists of registers: `pause`,
`weights`, `flush`, `sleep`, and `lora:<name>` for each adapter. A register holds the last command that set it, with the
epoch that recorded the command. Epochs count the recorded commands, so commands of concurrent controllers have one
order.
"""

import re
import uuid
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_float, check_int, check_matches, check_name, check_request_id, check_subject_token
from .errors import InvalidRequest
from .limits import Count, Epoch, Name, NonEmptyName, Seconds, Version
from .telemetry import RequestKind
from .weights import Canary, Digest, WeightSource

PauseMode = Literal["abort", "wait", "keep"]
"""Handling of the requests in flight. `abort` aborts them immediately, `wait` finishes them first, and `keep` continues
them after the resume."""
DEFAULT_TIMEOUT_S = 60.0
"""Seconds for a command that loads nothing."""
LOAD_TIMEOUT_S = 600.0
"""Seconds for a command that loads weights: enough for a large model from a slow disk."""
READ_TIMEOUT_S = 5.0
"""Seconds for a command that only reads the worker's memory."""
LORA_REGISTER = "lora:"
"""Prefix of the name of an adapter's register. The other registers are pause, weights, flush and sleep."""
HTTP_USER = re.compile(r"http:[A-Za-z0-9_.-]{1,64}")
"""Identity of a user of the HTTP service."""


class Command(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="command"
):
    """The fields that all commands have."""

    sets: ClassVar[str | None] = None
    """Register of the desired state that the command sets; see `register`."""
    is_of_one_model: ClassVar[bool] = False
    """True if the command applies to the workers of one model only."""

    v: Literal[1] = 1
    """Wire version."""
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the command. A worker executes a command once per id, and answers a repeated command with the same ack."""
    model: str | None = None
    """Name of the model whose workers must execute it; None: every model."""
    workers: tuple[str, ...] | None = None
    """Ids of the workers that must execute it; None: all workers, and those that start later."""
    epoch: int | None = None
    """Epoch of the desired state that contains the command. None: not recorded yet; the workers record the command."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds for each worker to execute it. For the state after a timeout, see docs/protocol.md."""
    by: str | None = None
    """User of the HTTP service for whom it is sent: `http:` and a name. None: the controller sends it for
    itself. Only workers with `Capabilities.transfer_leases` decode it."""

    def __post_init__(self) -> None:
        """Check names and ranges."""
        check_request_id("id", self.id)
        if self.model is not None:
            check_name("model", self.model)
        if self.workers is not None:
            if not self.workers:
                raise InvalidRequest("workers", "is empty", "at least one worker id, or null for all workers")
            for worker in self.workers:
                check_subject_token("workers", worker)
        if self.epoch is not None:
            check_int("epoch", self.epoch, 0, 2**53)
        check_float("timeout_s", self.timeout_s, 0, limits.MAX_TIMEOUT_S, above=True)
        if self.by is not None:
            check_matches("by", self.by, HTTP_USER, "http: and 1 to 64 of A-Z a-z 0-9 _ . -")

    @property
    def command(self) -> str:
        """Name of the command, the value of the JSON field `command`."""
        return str(type(self).__struct_config__.tag)

    @property
    def register(self) -> str | None:
        """Register of the desired state that the command sets; None for a one-off command."""
        return self.sets


class _OneModelCommand(Command, frozen=True, kw_only=True):
    """The fields that all commands have which apply to the workers of one model only."""

    is_of_one_model: ClassVar[bool] = True


def lora_register(name: str) -> str:
    """Return the name of the desired state's register for the adapter `name`."""
    return f"{LORA_REGISTER}{name}"


class Pause(Command, frozen=True, kw_only=True, tag="pause"):
    """Accept no more requests.

    `mode` decides whether the requests in flight end, finish, or continue after the resume.
    """

    sets: ClassVar[str | None] = "pause"

    mode: PauseMode = "keep"
    """Handling of the requests in flight."""
    clear_cache: bool = False
    """Also reset the prefix cache. With `keep`, the engine recomputes the requests in flight when they continue."""


class Resume(Command, frozen=True, kw_only=True, tag="resume"):
    """Undo `pause` and `drain`."""

    sets: ClassVar[str | None] = "pause"


class Drain(Command, frozen=True, kw_only=True, tag="drain"):
    """Hand the requests in flight to other workers and accept no more until `resume`."""

    sets: ClassVar[str | None] = "pause"


class Restart(Command, frozen=True, kw_only=True, tag="restart"):
    """Hand the requests in flight to other workers, then end the process with exit code 0. Its supervisor starts it.

    Nothing is recorded, so the next process serves. `applied` means that the worker has begun to stop. Workers of
    earlier releases reject this command.
    """

    incarnation: NonEmptyName
    """Incarnation that must end. Any other incarnation answers `stale`, so a late copy of the command ends nothing."""


class FlushCache(Command, frozen=True, kw_only=True, tag="flush_cache"):
    """Reset the prefix cache."""

    sets: ClassVar[str | None] = "flush"

    preempt: bool = False
    """True: also that of requests in flight, which the engine recomputes. False: the command fails if
    requests in flight use the cache."""


class Sleep(Command, frozen=True, kw_only=True, tag="sleep"):
    """Free the memory of an idle engine."""

    sets: ClassVar[str | None] = "sleep"

    level: Literal[1, 2] = 1
    """Level 1 keeps the weights in the machine's memory; level 2 drops them."""
    for_s: float | None = None
    """Seconds of a loan, after which the worker wakes if the memory is free; None: until `wake`. It needs `level` 2 and
    `workers`. The desired state has it beside the command, as `Recorded.for_s`."""

    def __post_init__(self) -> None:
        """Check the term of a loan in addition to the common fields."""
        Command.__post_init__(self)
        if self.for_s is None:
            return
        check_float("for_s", self.for_s, 0, limits.MAX_TIMEOUT_S, above=True)
        if self.level != 2:
            raise InvalidRequest("level", f"is {self.level} with for_s", "2: a lent engine keeps nothing")
        if self.workers is None:
            raise InvalidRequest("workers", "is missing with for_s", "the ids of the workers to lend")


class Wake(Command, frozen=True, kw_only=True, tag="wake"):
    """Undo `sleep`."""

    sets: ClassVar[str | None] = "sleep"


class CheckWeights(Command, frozen=True, kw_only=True, tag="check_weights"):
    """Check whether `update_weights` could load this source, and change nothing."""

    source: WeightSource
    """Location of the weights."""
    timeout_s: float = LOAD_TIMEOUT_S
    """Seconds for each worker to check the weights."""
    adapter: bool = False
    """True: the source is an adapter, as for `load_lora`. Workers without `Capabilities.weight_digests` reject this."""


class UpdateWeights(_OneModelCommand, frozen=True, kw_only=True, tag="update_weights"):
    """Replace the weights."""

    sets: ClassVar[str | None] = "weights"

    version: Version
    """Version of the new weights. Each token that they sample carries this version."""
    source: WeightSource
    """Location of the weights."""
    mode: PauseMode = "keep"
    """Handling of the requests in flight."""
    clear_cache: bool | None = None
    """True resets the prefix cache; None resets it unless `mode` is `keep`. New requests never use cache entries of
    older weights."""
    allow_rollback: bool = False
    """True: the version may be older than the present one, or equal to it with another source."""
    expected_canary: Canary | None = None
    """Canary result of the trainer's own copy of the weights; None: no comparison."""
    timeout_s: float = LOAD_TIMEOUT_S
    """Seconds for each worker to load the weights."""
    label: NonEmptyName | None = None
    """Name of this version, for example `step-42`."""
    digest: Digest | None = None
    """Digest of the tensors of this version. A worker that finds other content at the source serves nothing. None: the
    version is unpinned, and workers load what they find. Written only if all workers have
    `Capabilities.weight_digests`."""


class _LoraCommand(_OneModelCommand, frozen=True, kw_only=True):
    """The fields that all commands on one adapter have."""

    name: str

    def __post_init__(self) -> None:
        """Check the adapter's name in addition to the common fields."""
        Command.__post_init__(self)
        check_name("name", self.name)

    @property
    def register(self) -> str:
        """Register of the adapter; each adapter has its own."""
        return lora_register(self.name)


class LoadLora(_LoraCommand, frozen=True, kw_only=True, tag="load_lora"):
    """Load a LoRA adapter, or replace the adapter with the same name."""

    name: str
    """Name of the adapter in requests."""
    source: WeightSource
    """Location of the weights."""
    version: Version = 0
    """Version of the adapter. Each token that it samples carries this version."""
    timeout_s: float = LOAD_TIMEOUT_S
    """Seconds for each worker to load the weights."""
    digest: Digest | None = None
    """Digest of the adapter's tensors and of the bytes of `adapter_config.json`, used like that of weights."""
    for_base: bool = False
    """True: `name` is the model's own name, and its requests use the adapter until it is unloaded or the weights are
    replaced. Recorded only if all workers have `Capabilities.base_adapters`."""


class UnloadLora(_LoraCommand, frozen=True, kw_only=True, tag="unload_lora"):
    """Unload a LoRA adapter.

    Requests in flight that use the adapter end. Controllers do not record this for an adapter that no worker has.
    """

    name: str
    """Name of the adapter in requests."""


class Abort(Command, frozen=True, kw_only=True, tag="abort"):
    """End requests in flight of any client."""

    request_ids: Annotated[tuple[str, ...], Meta(min_length=1, max_length=limits.MAX_CHUNKS_PER_FRAME)] | None
    """Ids of the requests; None: all requests in flight. Workers of earlier releases fail a
    command with None as `invalid_command`."""


class State(Command, frozen=True, kw_only=True, tag="state"):
    """Ask for the worker's state. The ack contains the worker's presence."""


class ReadExperts(Command, frozen=True, kw_only=True, tag="read_experts"):
    """Ask how often the router chose each expert.

    Only workers with `Capabilities.telemetry_reads` support this command.
    """

    since: Count = 0
    """Number of the first interval to return, for `window` `recent`. An interval number is Unix time / 5 s. 0: all kept
    intervals, which cover two minutes."""
    window: Literal["recent", "versions"] = "recent"
    """`recent`: the last intervals; `versions`: all counts under each of the last 8 weight versions."""
    timeout_s: float = READ_TIMEOUT_S


class ReadRequest(Command, frozen=True, kw_only=True, tag="read_request"):
    """Ask for the history of a request, or for a list of requests.

    Only workers with `Capabilities.telemetry_reads` support this command.
    """

    request_id: str | None = None
    """Id of the request; None: the requests of the list `show`."""
    show: RequestKind | None = None
    """List of requests instead of one. Only workers with `Capabilities.request_lists` decode the last three fields."""
    client: Name | None = None
    """Only requests of this client; None: of all clients. Without a control subject, the sender itself."""
    limit: Annotated[int, Meta(ge=1, le=limits.MAX_TIMELINES)] = limits.MAX_TIMELINES
    """Maximum number of requests in the list."""
    timeout_s: float = READ_TIMEOUT_S

    def __post_init__(self) -> None:
        """Check in addition to the common fields that either a request or a list is named."""
        Command.__post_init__(self)
        if self.show is None or self.request_id is not None:
            check_request_id("request_id", self.request_id)


class Fence(Command, frozen=True, kw_only=True, tag="fence"):
    """Serve nothing until the next successful update or a restart. The fleet disagrees about this worker's weights."""

    reason: str = "a controller fenced it"
    """Reason for people; the worker announces it as `last_error`."""


class InitWeightTransfer(_OneModelCommand, frozen=True, kw_only=True, tag="init_weight_transfer"):
    """Pass `info` to the engine's `init_weight_transfer_engine`."""

    info: dict[str, Any]
    """Arguments in the format of the engine's transfer backend."""


class StartWeightUpdate(_OneModelCommand, frozen=True, kw_only=True, tag="start_weight_update"):
    """Hold the requests in flight and start to receive weights.

    The id of the command becomes the id of the transfer. Its owner may start again; others get `transfer_held`.
    """

    mode: PauseMode = "keep"
    """Handling of the requests in flight."""


class UpdateWeightChunk(_OneModelCommand, frozen=True, kw_only=True, tag="update_weight_chunk"):
    """Pass `info` to the engine's `update_weights`."""

    info: dict[str, Any]
    """Arguments in the format of the engine's transfer backend."""
    transfer: NonEmptyName | None = None
    """Id of the transfer that must be open; None: any of the same owner."""


class FinishWeightUpdate(_OneModelCommand, frozen=True, kw_only=True, tag="finish_weight_update"):
    """Verify the received weights, set the version and resume.

    A worker that joins later cannot repeat this update.
    """

    sets: ClassVar[str | None] = "weights"

    version: Version
    """Version of the new weights."""
    allow_rollback: bool = False
    """True: the version may be older than the present one, or equal to it with another source."""
    timeout_s: float = LOAD_TIMEOUT_S
    """Seconds for each worker to load the weights."""
    label: NonEmptyName | None = None
    """Name of this version, for example `step-42`."""
    transfer: NonEmptyName | None = None
    """Id of the transfer that must be open; None: any of the same owner."""


class CancelWeightUpdate(Command, frozen=True, kw_only=True, tag="cancel_weight_update"):
    """End the open transfer of any owner. The worker loads the desired weights again.

    Only workers with `Capabilities.transfer_leases` support this command. Without an open transfer, it fails with
    `transfer_expired`.
    """

    transfer: NonEmptyName | None = None
    """Id of the transfer to end; None: whichever is open."""


AnyCommand = (
    Pause
    | Resume
    | Drain
    | Restart
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
    | CancelWeightUpdate
)
"""All types of commands."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The user that signs with a key, and the permissions of that user. JSON, signed by the fleet's root key."""

    fleet: str
    """Name of the fleet. Other fleets reject the certificate."""
    role: Name
    """Role of the user."""
    name: str
    """Name of the user. Commands of this user are valid only on the user's own subject."""
    key: Annotated[str, Meta(max_length=64)]
    """Public key of the user's signatures: Ed25519, base64url."""
    models: tuple[Name, ...] | None = None
    """Models whose commands, desired states and uploads the user may sign; None: all."""
    commands: tuple[Name, ...] | None = None
    """Names of the commands that the user may send; None: all."""

    def __post_init__(self) -> None:
        """Check the names."""
        check_subject_token("fleet", self.fleet)
        check_subject_token("name", self.name)
        for model in self.models or ():
            check_name("models", model)

    def covers_model(self, model: str) -> bool:
        """Return True if the user may change this model."""
        return self.models is None or model in self.models

    def covers_command(self, command: str) -> bool:
        """Return True if the user may send this command."""
        return self.commands is None or command in self.commands

    @property
    def is_limited(self) -> bool:
        """True if the user may not send every command for every model."""
        return self.models is not None or self.commands is not None


class Recorded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of one register."""

    epoch: Epoch
    """Epoch that recorded the command."""
    command: AnyCommand
    """Command that set the register."""
    by: Name = ""
    """Who set it, as its controller says: a client, or `http:` and a user of the HTTP service. Empty: not announced."""
    at: Seconds = 0.0
    """Unix time of the recording, by the clock of the author. 0: not announced."""
    for_s: Seconds = 0.0
    """Seconds of a loan: the worker sleeps for them, and then wakes if its memory is free. 0: no loan. Workers of
    earlier releases ignore it and sleep until `wake`."""


class SeenCommand(msgspec.Struct, frozen=True, array_like=True):
    """A recorded command, whether or not a register still holds it."""

    id: str
    """Id of the command."""
    epoch: Epoch
    """Epoch that recorded the command."""


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of the workers of one model."""

    v: Literal[1] = 1
    """Wire version."""
    model: str
    """Name of the model."""
    epoch: Epoch = 0
    """Number of commands recorded so far."""
    registers: dict[str, Recorded] = {}
    """Registers for all workers of the model, by register name."""
    workers: dict[str, dict[str, Recorded]] = {}
    """Registers for single workers, by worker id and register name. Of two commands for one register, the later command
    counts."""
    seen: Annotated[tuple[SeenCommand, ...], Meta(max_length=limits.MAX_SEEN_COMMANDS)] = ()
    """Last recorded commands. A repeated command is not recorded again."""
    bucket: Name = ""
    """Random id that all states of a bucket have. A state with this id and an older
    epoch is a stale read. Empty: the program that wrote the state does not know this field."""

    def __post_init__(self) -> None:
        """Check the model's name."""
        check_name("model", self.model)

    @property
    def everywhere(self) -> tuple[dict[str, Recorded], ...]:
        """The registers for all workers, and those of each single worker."""
        return self.registers, *self.workers.values()

    @property
    def is_first(self) -> bool:
        """True if no command was ever recorded. Such a state only makes the model known."""
        return not (self.registers or self.workers or self.seen)
