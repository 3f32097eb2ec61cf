"""Presence of workers and clients, with the counters of a worker: JSON, readable with `nats sub`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_name, check_subject_token
from .control import PauseMode
from .errors import OpenEnum
from .limits import Count, Name, NonEmptyName, Seconds, Version
from .rows import DTYPES
from .weights import Digest, OpenTransfer, PublishedVersion, Staging

Positive = Annotated[int, Meta(ge=1, le=limits.MAX_COUNT)]
WorkerRole = Literal["both", "prefill", "decode"]
"""Phases of requests that a worker serves."""


class WorkerCounters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters of a worker since its process started.

    A counter never decreases until another process uses the worker's name.
    """

    requests: Count = 0
    """Requests that the worker has offered to clients; each attempt of each sample counts once."""
    rejected: Count = 0
    """Requests that the worker has rejected, for example because its engine does not support them."""
    ended: Count = 0
    """Requests that the engine has ended."""
    failed: Count = 0
    """Requests that the worker ended with an error, including those over budget and those of lost clients."""
    aborted: Count = 0
    """Requests that clients have aborted."""
    over_budget: Count = 0
    """Requests that the worker has ended because it buffered too many unread results."""
    returned: Count = 0
    """Requests that the worker has returned to the queue, for other workers or for a later time."""
    given_up: Count = 0
    """Requests that the worker has ended because its own lease expired."""
    prompt_tokens: Count = 0
    """Prompt tokens of the offered requests, including earlier generated tokens in resumed attempts."""
    generated_tokens: Count = 0
    """Tokens that the engine has generated for the offered requests, whether or not clients received them."""
    routing_bytes: Count = 0
    """Bytes of routed experts that the engine has computed for the offered requests."""
    first_tokens: Count = 0
    """Requests for which the engine has generated at least one token."""
    first_tokens_s: Seconds = 0.0
    """Sum of the seconds from offer to first token. Divide by `first_tokens` for the mean."""
    next_tokens: Count = 0
    """Tokens of all steps except each request's first step with tokens."""
    next_tokens_s: Seconds = 0.0
    """Sum of the seconds between those steps and the steps before them. Divide by `next_tokens` for the time of one
    token."""
    credit_stalls: Count = 0
    """Number of times that chunks for a client had to wait and were merged because its credit was used up."""
    frames: Count = 0
    """Published frames, including frames that were sent again."""
    frames_resent: Count = 0
    """Frames that the worker has sent again because a client did not receive them."""
    frames_lost: Count = 0
    """Frames that the worker could not publish. On a link, the worker sends them again."""
    links_broken: Count = 0
    """Links that the worker has replaced by new links because the client could not continue the old link."""
    clients_lost: Count = 0
    """Client incarnations that ended: closed, lease expired, or replaced by a newer incarnation."""
    requests_of_lost_clients: Count = 0
    """Requests of lost clients; also counted as `failed` if an error was sent in case the client returns."""
    fences: Count = 0
    """Number of times that the worker has fenced itself."""
    dropped_msgs: Count = 0
    """Messages that the worker's connection has dropped unread."""
    weights_fetched_bytes: Count = 0
    """Bytes of weights and adapters that the worker has fetched from the object store."""
    weights_staged: Count = 0
    """Completed stagings of weights and adapters."""
    weights_stagings_failed: Count = 0
    """Failed stagings."""
    weights_stagings_cancelled: Count = 0
    """Cancelled stagings: the source was no longer needed, or another source had priority."""
    weights_staging_s: Seconds = 0.0
    """Seconds of all stagings, including failed and cancelled stagings."""
    weights_paused_s: Seconds = 0.0
    """Seconds in which the engine ran no step for requests because of a replacement of weights."""
    placed: Count = 0
    """Offered requests that clients have placed directly at this worker instead of the queue."""
    placements_refused: Count = 0
    """Placed requests rejected because the worker had no room. Their clients publish them to the queue."""
    cached_prompt_tokens: Count = 0
    """Prompt tokens, of requests with a first token, that the engine took from its prefix cache or fetched."""
    recomputed_prompt_tokens: Count = 0
    """All other prompt tokens of requests with a first token: the engine computed them. Other workers may have had
    them."""
    placed_prefix: Count = 0
    """Placed requests, because the worker has a prefix of their prompt."""
    placed_group: Count = 0
    """Placed requests, because the worker computes the prompt of their group."""
    placed_session: Count = 0
    """Placed requests, because of their session."""
    placed_able: Count = 0
    """Placed requests, because the worker can serve them and other workers cannot."""


class RoutedExpertsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the routed experts that a worker's model returns."""

    num_layers: Annotated[int, Meta(ge=1, le=limits.MAX_LAYERS)]
    """Layers in a row. Some engines include layers without experts as zeros."""
    top_k: Annotated[int, Meta(ge=1, le=limits.MAX_TOP_K_EXPERTS)]
    """Experts chosen per token and layer."""
    num_experts: Annotated[int, Meta(ge=1, le=limits.MAX_EXPERTS)]
    """Experts per layer."""
    dtype: Literal["u1", "<u2"]
    """Dtype of the ids: u1 up to 256 experts, else <u2."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the row of one position."""
        return self.num_layers * self.top_k * DTYPES[self.dtype].itemsize


class SamplingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Maximum lengths in the sampling parameters of one request that an engine's sampler can hold."""

    allowed_token_ids: Count
    """Entries of `sampling.allowed_token_ids`."""
    logit_bias: Count
    """Entries of `sampling.logit_bias`."""
    min_tokens_stop_ids: Count
    """Entries of `sampling.stop_token_ids` of a request with `min_tokens`."""
    bad_words: Count
    """Entries of `sampling.bad_words_token_ids`."""
    bad_words_tokens: Count
    """Tokens of all entries of `sampling.bad_words_token_ids` together."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The capabilities of an engine. Each request is checked against them before the engine receives it."""

    engine: str
    """Name of the engine: `vllm` or `synthetic`."""
    engine_version: str
    """Version of the engine."""
    max_model_len: Positive
    """Maximum number of prompt and generated tokens together."""
    vocab_size: Annotated[int, Meta(ge=1, le=limits.MAX_TOKEN_ID + 1)]
    """Vocabulary size."""
    max_num_seqs: Positive
    """Requests that run at once. Further requests wait inside the engine."""
    max_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)]
    """Largest `sampling.logprobs` and `sampling.prompt_logprobs`."""
    dtype: str
    """Dtype of the weights, for example `bfloat16`."""
    routed_experts: RoutedExpertsInfo | None = None
    """Shape of the routed experts; None: this model returns none."""
    logprobs_mode: str = "processed_logprobs"
    """vLLM's name for the kind of logprobs. `processed_logprobs`: after temperature, penalties and truncation."""
    priority: bool = False
    """True if the engine's scheduler honours `priority`."""
    extra: tuple[str, ...] = ()
    """Names that `sampling.extra` may use."""
    signature: str = ""
    """Device, parallelism, dtype and engine version. Canaries are comparable only between equal signatures."""
    weight_updates: bool = False
    """True if weights can be replaced from a checkpoint. A reload of the worker's own weights verifies this at its
    start."""
    weight_transfer: bool = False
    """True if the engine's transfer engine can receive weights."""
    max_loras: Count = 0
    """Maximum number of loaded LoRA adapters."""
    sleep: bool = False
    """True if the command `sleep` frees memory."""
    data_parallel_size: Positive = 1
    """Number of replicas inside the engine. The fleet treats them as one worker."""
    role: WorkerRole = "both"
    """Phases that the worker serves. `prefill`: only prefill phases, sent directly by clients. `decode`: decode phases
    with the KV of a prefill worker, and requests without a prefill phase. `both`: whole requests."""
    kv_connector: Name | None = None
    """KV connector, with all that both workers of a transfer must share; None: no KV transfer."""
    routing_refusal: str | None = None
    """Reason why an engine with experts returns no routed experts; None: it returns them, or has no experts."""
    max_lora_rank: Positive | None = None
    """Largest rank of an adapter; None: unknown, or the worker loads no adapters."""
    world_size: Positive | None = None
    """Processes that hold the model's weights, over all replicas; None: not announced."""
    version_labels: bool = False
    """True if the worker decodes commands with a `label`. Workers of earlier releases do not."""
    sampling_mask: bool = False
    """True if the engine makes sampling masks. They are the ids that top-k, top-p and min-p kept for each token."""
    weight_deltas: bool = False
    """True if the worker stages published deltas. False: the release is older, or the engine may span several machines
    and rejects weights and adapters in the object store."""
    request_groups: bool = False
    """True if the worker decodes `siblings` in direct messages. Otherwise it serves only the first sample."""
    group_backlog: bool = False
    """True if the worker honours `may_wait` in direct messages. Requests of a group wait there for free slots."""
    telemetry_reads: bool = False
    """True if the worker answers `read_experts` and `read_request`. Workers of earlier releases reject both."""
    grammar_backend: Name | None = None
    """Backend of the engine's structured outputs. A request that needs another backend
    is rejected. None: no structured outputs, or not announced."""
    sampling_limits: SamplingLimits | None = None
    """Limits of the engine's sampler; None: only the limits of `SamplingParams`."""
    weight_digests: bool = False
    """True if the worker computes digests and decodes a `digest`. False also if the engine may span machines."""
    transfer_leases: bool = False
    """True if the worker decodes `by`, `transfer` and `cancel_weight_update`. Workers of earlier releases do not."""
    base_adapters: bool = False
    """True if the worker decodes `for_base` of `load_lora`. Workers of earlier releases do not."""
    request_lists: bool = False
    """True if the worker decodes `show` of `read_request` and receives reads on `read.<client>.<worker>`."""


class WorkerState(OpenEnum):
    """The state of a worker. Append-only."""

    STARTING = "starting"
    """The engine loads or warms up. Other workers serve the requests."""
    SERVING = "serving"
    """The engine is warm, the lease is held, and the worker matches the desired state."""
    UPDATING = "updating"
    """The worker applies the desired state: weights, adapters, pause. Requests wait in the queue."""
    PAUSED = "paused"
    """A command paused the worker. New requests wait; the pause's mode aborts, finishes or holds those in flight."""
    DRAINED = "drained"
    """A command, or the worker itself, drained it. It handed its requests to other workers and accepts no more."""
    ASLEEP = "asleep"
    """A command put the engine to sleep. The engine has freed its memory, and requests wait in the queue."""
    OUTDATED = "outdated"
    """The worker could not get the desired weights, or their source holds other content now. It serves nothing until a
    successful update or a restart."""
    POISONED = "poisoned"
    """The weights are partly written or wrong. The worker serves nothing until a successful update or a restart."""
    WAITING_FOR_WEIGHTS = "waiting_for_weights"
    """The worker cannot refetch the desired weights of a transfer engine. It serves nothing until the next update."""
    FENCED = "fenced"
    """The lease expired, and the worker ended its requests. A confirmed presence starts a new incarnation."""
    FAILED = "failed"
    """The engine died or completes no more steps. The process is about to exit with a non-zero code."""
    STOPPED = "stopped"
    """The worker shuts down normally. Its open requests resume on other workers immediately."""
    UNKNOWN = "unknown"
    """Never sent: a reader decodes a newer state as this value. Counts as present, but gets no new requests."""

    @property
    def is_present(self) -> bool:
        """True if requests may wait for the worker: it serves now or soon."""
        return self in _PRESENT


_PRESENT = frozenset({WorkerState.SERVING, WorkerState.UPDATING, WorkerState.PAUSED})


class LoraInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded LoRA adapter."""

    name: str
    """Name of the adapter in requests."""
    version: Version
    """Version of the adapter's weights."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of an engine. None means that the engine does not report the value. It does not mean 0.

    The counts are those of the scheduler after its last step. Rates cover the whole engine and about the last 10 s of
    computing time, not of wall time, so an idle or paused engine keeps its rates. Rates are None until the first
    measurement.
    """

    kv_cache_use: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the KV cache that requests use. Cached prefixes that no request uses count as free."""
    running: Count | None = None
    """Requests that the engine runs."""
    waiting: Count | None = None
    """Requests inside the engine that it has not started or has preempted."""
    preemptions: Count | None = None
    """Times that a running request lost its KV cache since warm-up. The engine recomputes that cache."""
    prefix_cache_queries: Count | None = None
    """Tokens looked up in the prefix cache since warm-up."""
    prefix_cache_hits: Count | None = None
    """Those of these tokens that the cache had."""
    prefill_tokens_per_s: Seconds | None = None
    """Computed prompt tokens per second, until the first token. Cached tokens do not
    count, and other requests may decode in the same time. Measurements are weighted by tokens, so long prompts
    dominate, and steps with fewer than 64 do not count. n uncached tokens take about n divided by this rate."""
    decode_tokens_per_s: Seconds | None = None
    """Generated tokens per second of all requests, after their first. One request gets
    about this rate divided by `running`; n tokens of all requests take about n divided by this rate."""
    kv_cache_tokens: Positive | None = None
    """Tokens that the KV cache can hold, over all replicas."""


class WorkerPresence(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's periodic presence."""

    v: Literal[1] = 1
    """Wire version."""
    worker: str
    """Id of the worker, unique in the fleet."""
    incarnation: str
    """Incarnation of the worker; it changes with each start. Frames carry the incarnation that sent them."""
    model: str
    """Served model name."""
    state: WorkerState
    """State of the worker."""
    weight_version: Version
    """Version of the weights that it samples from."""
    in_flight: Count
    """Accepted requests that have not ended."""
    free_slots: Count
    """Requests that it would start immediately."""
    uptime_s: Seconds
    """Seconds since the worker started."""
    lease_s: Annotated[float, Meta(gt=0)]
    """Seconds for which this message is valid."""
    capabilities: Capabilities | None = None
    """Capabilities; None while the engine starts."""
    held_bytes: Count = 0
    """Buffered bytes for clients: frames without a frame ack, and tokens that wait for credit."""
    last_error: str | None = None
    """Reason of the last failure, for people; None: no failure."""
    model_path: str | None = None
    """Folder of the model on the worker's machine. Programs on that machine find the tokenizer there."""
    pause_mode: PauseMode | None = None
    """Mode of the pause; None unless the worker is paused."""
    queued: Count = 0
    """Accepted requests that its engine does not have."""
    target_version: Version | None = None
    """Version of the weights that the desired state requires; None until the worker has read it."""
    epoch: Count = 0
    """Epoch of the desired state that it has applied, or failed to apply."""
    loras: tuple[LoraInfo, ...] = ()
    """Adapters that requests may name."""
    lease_age_s: Seconds = 0.0
    """Seconds since the server last confirmed a presence of the worker."""
    counters: WorkerCounters | None = None
    """Counters of the worker; None: not announced."""
    start_left_s: Seconds | None = None
    """Seconds for which requests may wait for its start; None: it does not start or announce it. 0 in the
    presence of a failed worker: its supervisor does not start it again, so no request waits for it."""
    host: Name | None = None
    """Name of the worker's machine; None: not announced."""
    pid: Count | None = None
    """Process id on that machine; None: not announced."""
    log: Name | None = None
    """Name of its log on that machine, a file or `journal`; None: unknown or not announced."""
    held_s: Seconds | None = None
    """Seconds since the server first confirmed a presence of this incarnation. Of two workers with one id, the worker
    with the larger value keeps the id. None: not announced."""
    engine_stats: EngineStats | None = None
    """Load of the engine; None while the engine starts, or not announced."""
    staging: Staging | None = None
    """Weights that the worker stages now; None: it stages none, or does not announce it."""
    cache_epoch: Count = 0
    """Number that increases whenever the prefix cache may have been emptied. A load of weights, a flush or a sleep
    does that; entries of earlier epochs are gone."""
    oldest_prefix_s: Seconds | None = None
    """Seconds since the last use of the oldest cached prefix. Earlier ones are gone, unless a request
    uses them. None: no prefix has been dropped yet, or the engine does not report it."""
    published: PublishedVersion | None = None
    """Published version that it staged last; None: it staged none, or does not announce it."""
    weight_digest: Digest | None = None
    """Digest of the tensors of the worker's weights; None: unknown or not announced."""
    transfer: OpenTransfer | None = None
    """Open transfer of weights into this worker; None: there is none, or the worker does not announce it."""
    loan_left_s: Seconds | None = None
    """Seconds until the worker's loan ends; 0: it is over, and the worker still sleeps, because its memory is in use
    or another `sleep` has replaced the loan. None: the worker is not lent."""

    def __post_init__(self) -> None:
        """Check that the worker's id is a subject token and that the model's name is valid."""
        check_subject_token("worker", self.worker)
        check_name("model", self.model)

    @property
    def base_adapter_version(self) -> int | None:
        """Version of the adapter with the model's name, which answers requests for the model; None: there is none."""
        return next((lora.version for lora in self.loras if lora.name == self.model), None)

    @property
    def served_version(self) -> int:
        """Version that answers the requests for the model: of its adapter, or else of the weights."""
        adapter = self.base_adapter_version
        return self.weight_version if adapter is None else adapter


class ClientState(OpenEnum):
    """The state of a client. Append-only."""

    LIVE = "live"
    """The client reads its frames. Workers run its requests and keep frames until the client acks them."""
    CLOSED = "closed"
    """The last message of a client that closes normally. Workers end its requests."""
    UNKNOWN = "unknown"
    """Never sent: a reader decodes a state of a newer client as this value. Counts as live."""


class ClientPresence(msgspec.Struct, frozen=True, kw_only=True):
    """A client's periodic presence, which tells workers that the client still waits for its results."""

    v: Literal[1] = 1
    """Wire version."""
    client: str
    """Name of the client, unique in the fleet."""
    incarnation: NonEmptyName
    """Incarnation of the client; it changes with each start. Workers end requests of earlier incarnations."""
    state: ClientState
    """State of the client."""
    lease_s: Annotated[float, Meta(gt=0)]
    """Seconds for which this message is valid."""
    uptime_s: Seconds = 0.0
    """Seconds since this incarnation started. If two clients use one name, the younger client keeps the name."""

    def __post_init__(self) -> None:
        """Check that the client's name is a subject token."""
        check_subject_token("client", self.client)
