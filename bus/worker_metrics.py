"""Metrics from the presence of workers. The HTTP service shows the fleet, a worker's probe shows the worker itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from ..schemas.presence import EngineStats, WorkerPresence

Labels = Mapping[str, str]

GAUGES: Final = {
    "in_flight": ("in_flight", "Requests that the worker has admitted and not ended"),
    "queued": ("queued", "Accepted requests that the engine has not started"),
    "free_slots": ("free_slots", "Requests that the worker would start immediately"),
    "held_bytes": (
        "held_bytes",
        "Buffered bytes that clients have not acknowledged; they grow without credit or connection",
    ),
    "weight_version": ("weight_version", "Version of the weights that the worker samples from"),
    "target_version": ("target_weight_version", "Version of the weights that the worker should have"),
    "lease_age_s": ("lease_age_seconds", "Seconds since presence of the worker was last confirmed"),
    "uptime_s": ("uptime_seconds", "Seconds since the worker started"),
}
"""Fields of `WorkerPresence`, their metric names, and descriptions."""
ENGINE_GAUGES: Final = {
    "prefill_tokens_per_s": (
        "prefill_tokens_per_second",
        "Prompt tokens per second in the last ten seconds in which the engine computed prompts",
    ),
    "decode_tokens_per_s": (
        "decode_tokens_per_second",
        "Tokens after the first per second in the last ten seconds in which the engine generated them",
    ),
}
"""Fields of `EngineStats` without a name in vLLM, their metric names, and descriptions."""
VLLM_GAUGES: Final = {
    "running": ("num_requests_running", "Requests that the engine runs"),
    "waiting": ("num_requests_waiting", "Requests in the engine that it has not started, or has preempted"),
    "kv_cache_use": ("kv_cache_usage_perc", "Share of the KV cache that requests use, 0 to 1"),
}
"""Fields of `EngineStats`, their names in vLLM, and descriptions."""
CACHE_SIZE: Final = "kv_cache_size_tokens"
"""vLLM's label that programs read as the size of an engine's KV cache."""
VLLM_COUNTERS: Final = {
    "preemptions": ("num_preemptions", "Running requests that the engine has preempted"),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens that the engine has looked up in its prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens that the engine has found in its prefix cache"),
}
"""Fields of `EngineStats` that only grow, their names in vLLM, and descriptions."""
VLLM_LABELS: Final = ("model_name", "engine", "worker")
"""The labels of metrics with vLLM's names."""
WORKER_TIMES: Final = {
    "time_to_first_token_seconds": (
        "first_tokens",
        "Seconds from a request's offer to its first token in the engine, without the time in the queue",
    ),
    "inter_token_seconds": (
        "next_tokens",
        "Seconds between steps of a request, divided by the tokens of the later step",
    ),
}
"""Sums of times by metric name: the field of `WorkerCounters` with their number, and descriptions. The field with the
seconds has the same name with the suffix `_s`."""
WORKER_COUNTERS: Final = {
    "requests": "Requests that the worker has offered to clients; each attempt of each sample counts",
    "rejected": "Requests that the worker has rejected",
    "ended": "Requests that the engine has finished",
    "failed": "Requests that the worker has failed, including those over budget and some of lost clients",
    "aborted": "Requests that the worker has ended because their clients aborted them",
    "over_budget": "Requests that the worker has failed because too many bytes waited for their clients",
    "returned": "Requests that the worker has returned to the queue",
    "given_up": "Requests that the worker has dropped because its lease had expired",
    "prompt_tokens": "Prompt tokens of offered requests; the prompt of a resumed attempt includes the delivered tokens",
    "cached_prompt_tokens": "Prompt tokens of requests with a first token that the engine had cached or fetched",
    "recomputed_prompt_tokens": "The other prompt tokens of the same requests: the engine computed them, whether or not"
    " another worker had them",
    "generated_tokens": "Tokens that the engine has generated, delivered or not",
    "routing_bytes": "Uncompressed bytes of routed experts that the engine has returned",
    "credit_stalls": "Times that output for a client had to wait for credit, because the client is slow",
    "frames": "Frames published, including resent frames",
    "frames_resent": "Frames resent because a client missed them",
    "frames_lost": "Frames that could not be published; the worker resends those of a link",
    "links_broken": "Links replaced by new ones because their clients had lost their position",
    "clients_lost": "Incarnations of clients that ended: closed, lease expired, or replaced by a later one",
    "requests_of_lost_clients": "Requests that the worker has ended because their client incarnation had ended",
    "fences": "Times that the worker has fenced itself because its lease had expired",
    "placed": "Requests that clients sent directly to the worker and that it has offered",
    "placed_prefix": "Placed requests for which the worker has a beginning of the prompt in its cache",
    "placed_group": "Placed requests for which the worker computes the prompt of their group",
    "placed_session": "Placed requests of a session of the worker",
    "placed_able": "Placed requests that the worker can serve and other workers cannot",
    "placements_refused": "Placed requests that the worker has rejected for lack of room; they went to the queue",
    "dropped_msgs": "Messages that the worker's connection has dropped unread",
}
"""Fields of `WorkerCounters`, and descriptions."""
WEIGHTS_COUNTERS: Final = {
    "weights_fetched_bytes": ("fetched_bytes", "Bytes of weights and adapters fetched from the object store"),
    "weights_staging_s": ("staging_seconds", "Seconds spent on stagings of weights and adapters, with any outcome"),
    "weights_paused_s": ("paused_seconds", "Seconds without engine steps for requests while weights were replaced"),
}
"""Fields of `WorkerCounters`, their metric names after `rollbus_weights_`, and descriptions."""
PUBLISHED_GAUGES: Final = {
    "stored_bytes": ("stored_bytes", "Stored bytes of the published version that the worker staged last"),
    "model_bytes": ("model_bytes", "Bytes of the tensors of that version"),
    "chain_length": ("chain_length", "Versions from the last anchor, without it, to that version"),
    "used_bytes": ("store_used_bytes", "Used bytes in the model's store when the worker started to stage that version"),
}
"""Fields of `PublishedVersion`, their metric names after `rollbus_weights_`, and descriptions."""
STAGING_OUTCOMES: Final = {
    "staged": "weights_staged",
    "failed": "weights_stagings_failed",
    "cancelled": "weights_stagings_cancelled",
}
"""Fields of `WorkerCounters` by the outcome of a staging."""


class MetricSample(NamedTuple):
    """One value."""

    suffix: str
    """The suffix to the family's name."""
    labels: Labels
    value: float


class Family(NamedTuple):
    """A metric, and its values for all workers that report it."""

    name: str
    """The name without the `_total` of counters."""
    kind: Literal["counter", "gauge", "summary"]
    text: str
    """The description on one line."""
    label_names: tuple[str, ...]
    samples: list[MetricSample]


def worker_families(workers: Sequence[WorkerPresence]) -> Iterator[Family]:
    """Return all metrics of these workers. A field that a worker does not report has no value."""
    yield from _own(workers)
    yield from _weights(workers)
    yield from _as_vllm(workers)
    names = ("worker", "model", "state")
    states = [MetricSample("", {**_labels(worker), "state": str(worker.state)}, 1) for worker in workers]
    yield Family("rollbus_worker_state", "gauge", "1 for the present state of the worker", names, states)


def prefix_cache_hit_ratio(stats: EngineStats) -> float | None:
    """Return the share of tokens that an engine found in its prefix cache; None: not reported."""
    if not stats.prefix_cache_queries or stats.prefix_cache_hits is None:
        return None
    return stats.prefix_cache_hits / stats.prefix_cache_queries


def _labels(worker: WorkerPresence) -> Labels:
    return {"worker": worker.worker, "model": worker.model}


def _families(
    prefix: str,
    kind: Literal["counter", "gauge"],
    table: Mapping[str, tuple[str, str]],
    reports: Sequence[tuple[Labels, object]],
    names: tuple[str, ...] = ("worker", "model"),
) -> Iterator[Family]:
    """Yield a family for each field of a table: the name without its prefix, and the description."""
    for field, (name, text) in table.items():
        values = [(labels, getattr(report, field)) for labels, report in reports]
        yield Family(f"{prefix}{name}", kind, text, names, _present("_total" if kind == "counter" else "", values))


def _own(workers: Sequence[WorkerPresence]) -> Iterator[Family]:
    names = ("worker", "model")
    engines = [(_labels(one), one.engine_stats) for one in workers if one.engine_stats is not None]
    counted = [(_labels(one), one.counters) for one in workers if one.counters is not None]
    yield from _families("rollbus_worker_", "gauge", GAUGES, [(_labels(one), one) for one in workers])
    yield from _families("rollbus_worker_", "gauge", ENGINE_GAUGES, engines)
    ratios = [(labels, prefix_cache_hit_ratio(stats)) for labels, stats in engines]
    text = "Share of looked-up tokens that were in the engine's prefix cache, since the engine was warm"
    yield Family("rollbus_worker_prefix_cache_hit_ratio", "gauge", text, names, _present("", ratios))
    for name, (field, text) in WORKER_TIMES.items():
        times = [
            MetricSample(suffix, labels, getattr(counters, f"{field}{of}"))
            for labels, counters in counted
            for suffix, of in (("_count", ""), ("_sum", "_s"))
        ]
        yield Family(f"rollbus_worker_{name}", "summary", text, names, times)
    counters = {field: (field, text) for field, text in WORKER_COUNTERS.items()}
    yield from _families("rollbus_worker_", "counter", counters, counted)


def _weights(workers: Sequence[WorkerPresence]) -> Iterator[Family]:
    names = ("worker", "model")
    counted = [(_labels(one), one.counters) for one in workers if one.counters is not None]
    yield from _families("rollbus_weights_", "counter", WEIGHTS_COUNTERS, counted)
    published = [(_labels(one), one.published) for one in workers if one.published is not None]
    yield from _families("rollbus_weights_", "gauge", PUBLISHED_GAUGES, published)
    limits = [(labels, version.limit_bytes or None) for labels, version in published]
    text = "Maximum bytes of this store; absent if it has no limit of its own"
    yield Family("rollbus_weights_store_limit_bytes", "gauge", text, names, _present("", limits))
    stagings = [
        MetricSample("_total", {**labels, "outcome": outcome}, getattr(counters, field))
        for labels, counters in counted
        for outcome, field in STAGING_OUTCOMES.items()
    ]
    text = "Stagings of weights and adapters by outcome: staged, failed, cancelled"
    yield Family("rollbus_weights_stagings", "counter", text, (*names, "outcome"), stagings)
    shares = [
        MetricSample("", _labels(one), min(one.staging.done_bytes / one.staging.total_bytes, 1.0))
        for one in workers
        if one.staging is not None and one.staging.total_bytes
    ]
    text = "Share of the bytes of the present stage that are done; absent if nothing is staged"
    yield Family("rollbus_weights_staging_ratio", "gauge", text, names, shares)


def _as_vllm(workers: Sequence[WorkerPresence]) -> Iterator[Family]:
    """Yield metrics with vLLM's names and labels. `engine`, a number in vLLM, is the worker's name."""
    engines = [
        ({"model_name": one.model, "engine": one.worker, "worker": one.worker}, one.engine_stats)
        for one in workers
        if one.engine_stats is not None
    ]
    yield from _families("vllm:", "gauge", VLLM_GAUGES, engines, VLLM_LABELS)
    yield from _families("vllm:", "counter", VLLM_COUNTERS, engines, VLLM_LABELS)
    sizes = [
        MetricSample("", {**labels, CACHE_SIZE: str(stats.kv_cache_tokens)}, 1)
        for labels, stats in engines
        if stats.kv_cache_tokens is not None
    ]
    text = f"1, with the size of the KV cache in tokens as `{CACHE_SIZE}`"
    yield Family("vllm:cache_config_info", "gauge", text, (*VLLM_LABELS, CACHE_SIZE), sizes)


def _present(suffix: str, values: Sequence[tuple[Labels, float | None]]) -> list[MetricSample]:
    return [MetricSample(suffix, labels, value) for labels, value in values if value is not None]


def exposition(workers: Sequence[WorkerPresence]) -> str:
    """Return all metrics of these workers in Prometheus's text format, version 0.0.4."""
    lines = []
    for family in worker_families(workers):
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        lines += [f"# HELP {name} {_escape(family.text)}", f"# TYPE {name} {family.kind}"]
        for sample in family.samples:
            labels = ",".join(f'{key}="{_escape(value, quotes=True)}"' for key, value in sample.labels.items())
            lines.append(f"{family.name}{sample.suffix}{{{labels}}} {float(sample.value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
