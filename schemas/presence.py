"""What a worker says about itself: JSON, readable with `nats sub`."""

import enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_name, check_subject_token
from .control import PauseMode
from .rows import DTYPES
from .weights import PublishedVersion, Staging

__all__ = [
    "Capabilities",
    "ClientPresence",
    "ClientState",
    "EngineStats",
    "LoraInfo",
    "Role",
    "RoutedExpertsInfo",
    "Staging",
    "WorkerCounters",
    "WorkerPresence",
    "WorkerState",
]


NotNegative = Annotated[int, Meta(ge=0, le=limits.MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=limits.MAX_COUNT)]
NotNegativeSeconds = Annotated[float, Meta(ge=0)]


class RoutedExpertsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the routing that a worker's model returns."""

    num_layers: Annotated[int, Meta(ge=1, le=limits.MAX_LAYERS)]
    """Layers in a row; layers without experts are included as zeros where the engine does so."""
    top_k: Annotated[int, Meta(ge=1, le=limits.MAX_TOP_K_EXPERTS)]
    """Experts chosen per token and layer."""
    num_experts: Annotated[int, Meta(ge=1, le=limits.MAX_EXPERTS)]
    """Experts per layer."""
    dtype: Literal["u1", "<u2"]
    """One dtype per model: u1 up to 256 experts, else <u2."""

    @property
    def row_bytes(self) -> int:
        """What the row of one position takes."""
        return self.num_layers * self.top_k * DTYPES[self.dtype].itemsize


Role = Literal["both", "prefill", "decode"]
"""Which part of requests a worker serves."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do; requests are checked against it before the engine sees them."""

    engine: str
    """`vllm` or `synthetic`."""
    engine_version: str
    """As the engine states it."""
    max_model_len: Positive
    """Prompt and generated tokens together."""
    vocab_size: Positive
    """Token ids are 0 to vocab_size - 1."""
    max_num_seqs: Positive
    """Requests that run at once; more wait inside the engine."""
    max_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)]
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
    signature: str = ""
    """Device, parallelism and dtype with the engine's version: canaries are compared between workers of the same."""
    weight_updates: bool = False
    """Weights can be replaced from a checkpoint; proven at the start, by loading the worker's own once more."""
    weight_transfer: bool = False
    """Weights can be taken from the engine's own transfer engine."""
    max_loras: NotNegative = 0
    """LoRA adapters that may be loaded at once; 0: none."""
    sleep: bool = False
    """`sleep` frees memory."""
    data_parallel_size: Positive = 1
    """Replicas inside the engine; to the fleet they are one worker."""
    role: Role = "both"
    """`prefill`: it takes nothing but prefill legs, from clients directly. `decode`: it takes over the KV of prefill
    legs, and what has none too. `both`: it serves whole requests."""
    kv_connector: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] | None = None
    """How its KV goes to other workers, and all that has to be equal for that on both sides; None: it does not."""
    routing_refusal: str | None = None
    """Why the engine returns no routing although its model has experts; None: it returns it, or there is none."""
    max_lora_rank: Positive | None = None
    """Largest rank of an adapter; None: not known, or it takes none."""
    world_size: Positive | None = None
    """Processes that hold the model's weights, those of all replicas inside the engine; None: not announced."""
    version_labels: bool = False
    """It reads commands that give a version of the weights a `label`; workers of earlier releases do not."""
    sampling_mask: bool = False
    """The engine makes sampling masks: the ids that top-k, top-p and min-p left for each token."""
    weight_deltas: bool = False
    """It stages versions of weights that are published as deltas. False: it is of an earlier release, or its engine
    may span several machines, and it refuses weights and adapters in the object store."""
    request_groups: bool = False
    """It reads `siblings` in direct messages; workers of earlier releases serve the first sample alone."""
    group_backlog: bool = False
    """It reads `may_wait` in direct messages: requests of a group wait there for the next free slots."""
    telemetry_reads: bool = False
    """It answers `read_experts` and `read_request`; workers of earlier releases refuse both."""


class WorkerState(enum.StrEnum):
    """What a worker is doing. Append-only."""

    STARTING = "starting"
    """The engine is loading or warming up. Requests are left to other workers."""
    SERVING = "serving"
    """The engine is warm, the lease is held, all is as desired. Requests are pulled from the queue and run."""
    UPDATING = "updating"
    """It brings itself to what is desired: weights, adapters, pause. Requests wait in the queue."""
    PAUSED = "paused"
    """As a command said. Requests wait in the queue; those in flight ended, are being finished, or are kept."""
    DRAINED = "drained"
    """As a command said. It has handed its requests to others and takes no more."""
    ASLEEP = "asleep"
    """As a command said. The engine has given up its memory, and requests wait in the queue."""
    OUTDATED = "outdated"
    """It could not get the desired weights and has intact ones of before: it serves nothing, unlike one that lacks only
    an adapter. A good update or a restart brings it back."""
    POISONED = "poisoned"
    """Its weights are half written, or not what they should be: it serves nothing. A good update or a restart brings it
    back."""
    WAITING_FOR_WEIGHTS = "waiting_for_weights"
    """The desired weights came by a transfer engine, and cannot be had again. It serves nothing until the next
    update."""
    FENCED = "fenced"
    """Its lease ran out unconfirmed, and it gave up all that it had. It comes back as a new incarnation when an
    announcement is confirmed again."""
    FAILED = "failed"
    """The engine died, or makes no step any more. The process is about to exit with a non-zero code."""
    STOPPED = "stopped"
    """The last message of a worker that shut down in order. Its open requests go on at other workers at once."""
    UNKNOWN = "unknown"
    """Never sent: how this side reads a state that a newer worker appended. Present, but not for new requests."""

    @classmethod
    def _missing_(cls, value: object) -> "WorkerState":
        return cls.UNKNOWN

    @property
    def is_present(self) -> bool:
        """Requests may wait for it: it serves, or soon will."""
        return self in _PRESENT


_PRESENT = frozenset({WorkerState.SERVING, WorkerState.UPDATING, WorkerState.PAUSED})


class LoraInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that is loaded."""

    name: str
    """What requests call it."""
    version: Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)]
    """Of its weights."""


class WorkerCounters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker has counted since its process began; none of it falls before another process takes its name."""

    requests: NotNegative = 0
    """Requests that it has offered to their clients; each attempt of each sample is one."""
    rejected: NotNegative = 0
    """Requests that it has refused, for example because its engine cannot do what they ask for."""
    ended: NotNegative = 0
    """Requests that its engine has ended."""
    failed: NotNegative = 0
    """Requests that it has ended with an error, those over budget and those of lost clients among them."""
    aborted: NotNegative = 0
    """Requests that it has ended because their clients wanted no more of them."""
    over_budget: NotNegative = 0
    """Requests that it has ended because too much of what it holds was not taken."""
    returned: NotNegative = 0
    """Requests that it has given back to the queue for other workers, or for later."""
    given_up: NotNegative = 0
    """Requests that it has given up because its own lease had run out."""
    prompt_tokens: NotNegative = 0
    """Prompt tokens of the requests that it has offered, those of resumed attempts with what came before."""
    generated_tokens: NotNegative = 0
    """Tokens that its engine has made for them, whether or not they were taken."""
    routing_bytes: NotNegative = 0
    """Routed experts that its engine has made for them, in bytes."""
    first_tokens: NotNegative = 0
    """Requests of which its engine has made a token."""
    first_tokens_s: NotNegativeSeconds = 0.0
    """Seconds from their offers to their first tokens, added up: their mean is this over `first_tokens`."""
    next_tokens: NotNegative = 0
    """Tokens of all steps but each request's first with tokens."""
    next_tokens_s: NotNegativeSeconds = 0.0
    """Seconds between those steps and the ones before, added up: the time of one token is this over `next_tokens`."""
    credit_stalls: NotNegative = 0
    """How often a client's chunks had to wait, and were merged, because it had granted no more credit."""
    frames: NotNegative = 0
    """Frames that it has published, those sent again included."""
    frames_resent: NotNegative = 0
    """Frames that it has sent again because a client missed them."""
    frames_lost: NotNegative = 0
    """Frames that it could not publish; on a link they are sent again."""
    links_broken: NotNegative = 0
    """Links that it has given up for new ones, as their clients had lost their place."""
    clients_lost: NotNegative = 0
    """Lives of clients that have ended: closed, silent for too long, or followed by another."""
    requests_of_lost_clients: NotNegative = 0
    """Requests that nobody waited for any more; those that it has told so, in case they come back, are `failed` too."""
    fences: NotNegative = 0
    """How often it has fenced itself."""
    dropped_msgs: NotNegative = 0
    """Messages that its connection has dropped unread."""
    weights_fetched_bytes: NotNegative = 0
    """Bytes of weights and adapters that it has fetched from the object store."""
    weights_staged: NotNegative = 0
    """Stagings of weights and adapters that it has brought to their end."""
    weights_stagings_failed: NotNegative = 0
    """Stagings that have failed."""
    weights_stagings_cancelled: NotNegative = 0
    """Stagings that it has broken off because nobody needed them any more, or others came first."""
    weights_staging_s: NotNegativeSeconds = 0.0
    """Seconds that its stagings took, whatever came of them."""
    weights_paused_s: NotNegativeSeconds = 0.0
    """Seconds in which its engine made no step for requests because weights were replaced."""
    placed: NotNegative = 0
    """Requests that clients have placed at this worker past the queue, and that it has offered."""
    placements_refused: NotNegative = 0
    """Placed requests that it has refused for want of room; their clients put them into the queue."""
    cached_prompt_tokens: NotNegative = 0
    """Of the prompt tokens of requests with a first token, those that its engine did not compute: it had them in its
    prefix cache, or fetched them."""
    recomputed_prompt_tokens: NotNegative = 0
    """Of the prompt tokens of requests with a first token, all others: its engine computed them, whether or not another
    worker had them."""
    placed_prefix: NotNegative = 0
    """Of the placed requests, those that came because it has a beginning of their prompt."""
    placed_group: NotNegative = 0
    """Of the placed requests, those that came because it computes the prompt of their group."""
    placed_session: NotNegative = 0
    """Of the placed requests, those that came because of their session."""
    placed_able: NotNegative = 0
    """Of the placed requests, those that came because it can serve them where others cannot."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine says of its own load; None: this engine does not say, which is not 0.

    The counts are the scheduler's after its last step. Rates are of the engine as a whole and remember the last 10 s or
    so of computing, not of the clock: an idle or paused engine keeps them. They are None until the first measurement.
    """

    kv_cache_use: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the KV cache that requests hold, 0 to 1; cached prefixes that no request uses count as free."""
    running: NotNegative | None = None
    """Requests that the engine computes."""
    waiting: NotNegative | None = None
    """Requests inside the engine that it has not begun, or has preempted."""
    preemptions: NotNegative | None = None
    """How often it has taken the KV cache from a running request, since it was warm; it computes that again."""
    prefix_cache_queries: NotNegative | None = None
    """Tokens of the requests that it has looked up in its prefix cache, since it was warm."""
    prefix_cache_hits: NotNegative | None = None
    """Tokens of those that it found there and did not compute."""
    prefill_tokens_per_s: NotNegativeSeconds | None = None
    """Prompt tokens computed, cached ones left out, by the time from when a request is scheduled to its first token;
    beside whatever else was decoded then. Measurements weigh by their tokens, so that long prompts decide: n uncached
    tokens take about n over this."""
    decode_tokens_per_s: NotNegativeSeconds | None = None
    """Tokens after the first, of all requests together, by the time of the steps that made them. One request gets about
    this over `running`; n tokens of all of them take about n over this."""
    kv_cache_tokens: Positive | None = None
    """Tokens that its KV cache holds, those of all replicas together."""


class WorkerPresence(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's periodic message about itself."""

    v: Literal[1] = 1
    """Wire version."""
    worker: str
    """Its id, unique in the fleet; a subject token."""
    incarnation: str
    """Changes with each start of the worker; frames of another incarnation belong to another life."""
    model: str
    """Served model name."""
    state: WorkerState
    """What the worker is doing."""
    weight_version: Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)]
    """Of the weights that it samples from now."""
    in_flight: NotNegative
    """Requests that the worker has admitted and not ended."""
    free_slots: NotNegative
    """Requests that it would start at once."""
    uptime_s: Annotated[float, Meta(ge=0)]
    """Seconds since the worker started."""
    lease_s: Annotated[float, Meta(gt=0)]
    """Seconds for which this message is good."""
    capabilities: Capabilities | None = None
    """None while the engine is starting."""
    held_bytes: NotNegative = 0
    """What clients have not taken yet: frames not acknowledged and tokens that wait for credit."""
    last_error: str | None = None
    """Why it failed, for people."""
    model_path: str | None = None
    """The model's folder on the worker's machine; a program on the same machine finds the tokenizer there."""
    pause_mode: PauseMode | None = None
    """While it is paused: how."""
    queued: NotNegative = 0
    """Requests that it has taken and its engine has not."""
    target_version: Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)] | None = None
    """The weights that it should have; None until it has read the desired state."""
    epoch: NotNegative = 0
    """Of the desired state that it has brought itself to, or failed to."""
    loras: tuple[LoraInfo, ...] = ()
    """Adapters that requests may name."""
    lease_age_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds since an announcement of it was last confirmed."""

    counters: WorkerCounters | None = None
    """What it has counted; None: it does not say."""
    start_left_s: Annotated[float, Meta(ge=0)] | None = None
    """While it starts: seconds for which requests may wait for it. None: it does not start, or does not say."""
    host: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] | None = None
    """Name of the machine that it runs on; None: not announced."""
    pid: NotNegative | None = None
    """Its process id on that machine; None: not announced."""
    held_s: NotNegativeSeconds | None = None
    """Seconds since the server first confirmed an announcement of this incarnation. Of two workers of one id, the one
    that has held it longer keeps it. None: not announced."""
    engine_stats: EngineStats | None = None
    """The load of its engine; None while the engine starts, or not announced."""
    staging: Staging | None = None
    """The weights that it is staging; None: it stages none, or does not say."""
    cache_epoch: NotNegative = 0
    """Rises whenever its prefix cache was emptied, or may have been: by a load of weights, a flush, or a sleep. What
    this incarnation cached in an earlier epoch is gone."""
    oldest_prefix_s: NotNegativeSeconds | None = None
    """Seconds since the oldest prefix was used that its prefix cache may still have; what was used earlier is gone,
    unless a request holds it. None: it may have forgotten none, or its engine does not say."""
    published: PublishedVersion | None = None
    """The published version that it staged last, in this life; None: its weights are of no published version, or it
    does not say."""

    def __post_init__(self) -> None:
        """Refuse names that cannot stand in a subject."""
        check_subject_token("worker", self.worker)
        check_name("model", self.model)


class ClientState(enum.StrEnum):
    """Whether a client is there. Append-only."""

    LIVE = "live"
    """It reads its frames. Workers run its requests and keep what it has not acknowledged."""
    CLOSED = "closed"
    """The last message of a client that was closed in order. Nobody waits for its requests: workers end them."""
    UNKNOWN = "unknown"
    """Never sent: how this side reads a state that a newer client appended. Counts as live."""

    @classmethod
    def _missing_(cls, value: object) -> "ClientState":
        return cls.UNKNOWN


class ClientPresence(msgspec.Struct, frozen=True, kw_only=True):
    """A client's periodic message to the workers: as long as it comes, somebody waits for their results."""

    v: Literal[1] = 1
    """Wire version."""
    client: str
    """Its name, unique among live clients of the fleet; a subject token."""
    incarnation: Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]
    """Changes with each start of the client; requests of an earlier one are given up."""
    state: ClientState
    """Whether it is there."""
    lease_s: Annotated[float, Meta(gt=0)]
    """Seconds for which this message is good."""
    uptime_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds since this life began: of two clients of one name, the younger keeps it."""

    def __post_init__(self) -> None:
        """Refuse a name that cannot stand in a subject."""
        check_subject_token("client", self.client)
