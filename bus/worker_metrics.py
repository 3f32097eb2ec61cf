"""What workers say of themselves as metrics: the HTTP service shows those of the fleet, a worker's probe its own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from ..schemas.presence import EngineStats, WorkerPresence

__all__ = ["VLLM_LABELS", "Family", "MetricSample", "exposition", "prefix_cache_hit_ratio", "worker_families"]

Labels = Mapping[str, str]

GAUGES: Final = {
    "in_flight": ("in_flight", "Requests that the worker has admitted and not ended"),
    "queued": ("queued", "Requests that it has taken and its engine has not"),
    "free_slots": ("free_slots", "Requests that it would start at once"),
    "held_bytes": ("held_bytes", "What clients have not taken yet: it grows where credit or connections are missing"),
    "weight_version": ("weight_version", "Of the weights that it samples from"),
    "target_version": ("target_weight_version", "Of the weights that it should have"),
    "lease_age_s": ("lease_age_seconds", "Since an announcement of it was last confirmed"),
    "uptime_s": ("uptime_seconds", "Since it started"),
}
"""Fields of `WorkerPresence`, their names here, and what they are."""
ENGINE_GAUGES: Final = {
    "prefill_tokens_per_s": (
        "prefill_tokens_per_second",
        "Prompt tokens that its engine computes a second while it computes any, of the last ten seconds of that",
    ),
    "decode_tokens_per_s": (
        "decode_tokens_per_second",
        "Tokens after the first that its engine makes a second while it makes any, of the last ten seconds of that",
    ),
}
"""Fields of `EngineStats` without a name in vLLM, their names here, and what they are."""
VLLM_GAUGES: Final = {
    "running": ("num_requests_running", "Requests that the engine computes"),
    "waiting": ("num_requests_waiting", "Requests in the engine that it has not begun, or has preempted"),
    "kv_cache_use": ("kv_cache_usage_perc", "Share of the KV cache that requests hold: 1 is all of it"),
}
"""Fields of `EngineStats`, vLLM's names for them, and what they are."""
CACHE_SIZE: Final = "kv_cache_size_tokens"
"""vLLM's label for what programs know as the size of an engine's KV cache."""
VLLM_COUNTERS: Final = {
    "preemptions": ("num_preemptions", "How often the engine has taken the KV cache from a running request"),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens that the engine has looked up in its prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens of those that it found there"),
}
"""Fields of `EngineStats` that only grow, vLLM's names for them, and what they are."""
VLLM_LABELS: Final = ("model_name", "engine", "worker")
"""Of metrics by vLLM's names."""
WORKER_TIMES: Final = {
    "time_to_first_token_seconds": (
        "first_tokens",
        "From a request's offer to its first token, as the engine makes it: without the time in the queue",
    ),
    "inter_token_seconds": ("next_tokens", "Time between steps of a request over the tokens of the later one"),
}
"""Sums of times by their names here: the field of `WorkerCounters` with their number, that with the seconds is named
after it, and what they are."""
WORKER_COUNTERS: Final = {
    "requests": "Requests that it has offered to clients: each attempt of each sample is one",
    "rejected": "Requests that it has refused",
    "ended": "Requests that its engine has ended",
    "failed": "Requests that it has ended with an error; those over budget, and some of lost clients, among them",
    "aborted": "Requests that it has ended because their clients wanted no more of them",
    "over_budget": "Requests that it has ended because clients had left too much untaken",
    "returned": "Requests that it has given back to the queue",
    "given_up": "Requests that it has given up because its lease had run out",
    "prompt_tokens": "Prompt tokens of the requests offered; a resumed attempt's prompt ends with what came before",
    "cached_prompt_tokens": "Prompt tokens of requests with a first token that its engine had cached or fetched",
    "recomputed_prompt_tokens": "The other prompt tokens of the same requests: its engine computed them, whether or not"
    " another worker had them",
    "generated_tokens": "Tokens that its engine has made, whether or not they were taken",
    "routing_bytes": "Routed experts that its engine has made, raw",
    "credit_stalls": "How often what was for a client had to wait for its credit: the client does not keep up",
    "frames": "Frames published, those sent again included",
    "frames_resent": "Frames sent again because a client missed them",
    "frames_lost": "Frames that could not be published; on a link they are sent again",
    "links_broken": "Links given up for new ones, as their clients had lost their place",
    "clients_lost": "Lives of clients that ended: closed, silent for too long, or followed by another",
    "requests_of_lost_clients": "Requests that nobody waited for any more",
    "fences": "How often it has fenced itself: its lease had run out unconfirmed",
    "placed": "Requests that clients placed at it, past the queue, and that it has offered",
    "placed_prefix": "Placed requests that came because it has a beginning of their prompt",
    "placed_group": "Placed requests that came because it computes the prompt of their group",
    "placed_session": "Placed requests that came because of their session",
    "placed_able": "Placed requests that came because it can serve them where others cannot",
    "placements_refused": "Placed requests that it has refused for want of room; they went to the queue",
    "dropped_msgs": "Messages that its connection has dropped unread",
}
"""Fields of `WorkerCounters`, and what they are."""
WEIGHTS_COUNTERS: Final = {
    "fetched_bytes": ("weights_fetched_bytes", "Bytes of weights and adapters fetched from the object store"),
    "staging_seconds": ("weights_staging_s", "Spent on stagings of weights and adapters, whatever came of them"),
    "paused_seconds": ("weights_paused_s", "In which the engine made no step for requests as weights were replaced"),
}
"""By their names here, behind `rollbus_weights_`: fields of `WorkerCounters`, and what they are."""
PUBLISHED_GAUGES: Final = {
    "stored_bytes": ("stored_bytes", "Bytes in the store of the published version that it staged last"),
    "model_bytes": ("model_bytes", "Bytes of the tensors of that version"),
    "chain_length": ("chain_length", "Versions from the last anchor, without it, to that version"),
    "store_used_bytes": ("used_bytes", "Bytes in use in the store of the model, as the worker began to stage it"),
    "store_limit_bytes": ("limit_bytes", "Bytes that this store may have; absent where it has no limit of its own"),
}
"""By their names here, behind `rollbus_weights_`: fields of `PublishedVersion`, and what they are."""
STAGING_OUTCOMES: Final = {
    "staged": "weights_staged",
    "failed": "weights_stagings_failed",
    "cancelled": "weights_stagings_cancelled",
}
"""Fields of `WorkerCounters` by how stagings ended."""


class MetricSample(NamedTuple):
    """One value."""

    suffix: str
    """Of the family's name."""
    labels: Labels
    value: float


class Family(NamedTuple):
    """A metric, and its values for all workers that say it."""

    name: str
    """Without the `_total` of counters."""
    kind: Literal["counter", "gauge", "summary"]
    text: str
    """What it is, on one line."""
    label_names: tuple[str, ...]
    samples: list[MetricSample]


def worker_families(workers: Sequence[WorkerPresence]) -> Iterator[Family]:
    """All metrics of these workers; what a worker does not say has no value."""
    yield from _own(workers)
    yield from _weights(workers)
    yield from _as_vllm(workers)
    names = ("worker", "model", "state")
    states = [MetricSample("", {**_labels(worker), "state": str(worker.state)}, 1) for worker in workers]
    yield Family("rollbus_worker_state", "gauge", "1 for the state that it is in", names, states)


def prefix_cache_hit_ratio(stats: EngineStats) -> float | None:
    """Share of the tokens that an engine has looked up in its prefix cache and found; None: it says none of it."""
    if not stats.prefix_cache_queries or stats.prefix_cache_hits is None:
        return None
    return stats.prefix_cache_hits / stats.prefix_cache_queries


def _labels(worker: WorkerPresence) -> Labels:
    return {"worker": worker.worker, "model": worker.model}


def _own(workers: Sequence[WorkerPresence]) -> Iterator[Family]:
    names = ("worker", "model")
    engines = [(_labels(one), one.engine_stats) for one in workers if one.engine_stats is not None]
    counted = [(_labels(one), one.counters) for one in workers if one.counters is not None]
    for field, (name, text) in GAUGES.items():
        values = [(_labels(one), getattr(one, field)) for one in workers]
        yield Family(f"rollbus_worker_{name}", "gauge", text, names, _known("", values))
    for field, (name, text) in ENGINE_GAUGES.items():
        values = [(labels, getattr(stats, field)) for labels, stats in engines]
        yield Family(f"rollbus_worker_{name}", "gauge", text, names, _known("", values))
    ratios = [(labels, prefix_cache_hit_ratio(stats)) for labels, stats in engines]
    text = "Share of the tokens looked up in its engine's prefix cache that were there, since the engine was warm"
    yield Family("rollbus_worker_prefix_cache_hit_ratio", "gauge", text, names, _known("", ratios))
    for name, (field, text) in WORKER_TIMES.items():
        times = [
            MetricSample(suffix, labels, getattr(counters, f"{field}{of}"))
            for labels, counters in counted
            for suffix, of in (("_count", ""), ("_sum", "_s"))
        ]
        yield Family(f"rollbus_worker_{name}", "summary", text, names, times)
    for field, text in WORKER_COUNTERS.items():
        totals = [MetricSample("_total", labels, getattr(counters, field)) for labels, counters in counted]
        yield Family(f"rollbus_worker_{field}", "counter", text, names, totals)


def _weights(workers: Sequence[WorkerPresence]) -> Iterator[Family]:
    names = ("worker", "model")
    counted = [(_labels(one), one.counters) for one in workers if one.counters is not None]
    for name, (field, text) in WEIGHTS_COUNTERS.items():
        totals = [MetricSample("_total", labels, getattr(counters, field)) for labels, counters in counted]
        yield Family(f"rollbus_weights_{name}", "counter", text, names, totals)
    published = [(_labels(one), one.published) for one in workers if one.published is not None]
    for name, (field, text) in PUBLISHED_GAUGES.items():
        values = [(labels, getattr(version, field)) for labels, version in published]
        if field == "limit_bytes":
            values = [(labels, limit or None) for labels, limit in values]
        yield Family(f"rollbus_weights_{name}", "gauge", text, names, _known("", values))
    stagings = [
        MetricSample("_total", {**labels, "outcome": outcome}, getattr(counters, field))
        for labels, counters in counted
        for outcome, field in STAGING_OUTCOMES.items()
    ]
    text = "Stagings of weights and adapters by how they ended: staged, failed, cancelled"
    yield Family("rollbus_weights_stagings", "counter", text, (*names, "outcome"), stagings)
    shares = [
        MetricSample("", _labels(one), min(one.staging.done_bytes / one.staging.total_bytes, 1.0))
        for one in workers
        if one.staging is not None and one.staging.total_bytes
    ]
    text = "Share of the bytes of the present stage that are done; absent where nothing is staged"
    yield Family("rollbus_weights_staging_ratio", "gauge", text, names, shares)


def _as_vllm(workers: Sequence[WorkerPresence]) -> Iterator[Family]:
    """By vLLM's names and labels, for programs that read those; `engine`, which vLLM numbers, is the worker's name."""
    names = VLLM_LABELS
    engines = [
        ({"model_name": one.model, "engine": one.worker, "worker": one.worker}, one.engine_stats)
        for one in workers
        if one.engine_stats is not None
    ]
    for field, (name, text) in VLLM_GAUGES.items():
        values = [(labels, getattr(stats, field)) for labels, stats in engines]
        yield Family(f"vllm:{name}", "gauge", text, names, _known("", values))
    for field, (name, text) in VLLM_COUNTERS.items():
        values = [(labels, getattr(stats, field)) for labels, stats in engines]
        yield Family(f"vllm:{name}", "counter", text, names, _known("_total", values))
    sizes = [
        MetricSample("", {**labels, CACHE_SIZE: str(stats.kv_cache_tokens)}, 1)
        for labels, stats in engines
        if stats.kv_cache_tokens is not None
    ]
    text = f"1, with the size of the KV cache in tokens as `{CACHE_SIZE}`"
    yield Family("vllm:cache_config_info", "gauge", text, (*names, CACHE_SIZE), sizes)


def _known(suffix: str, values: Sequence[tuple[Labels, float | None]]) -> list[MetricSample]:
    return [MetricSample(suffix, labels, value) for labels, value in values if value is not None]


def exposition(workers: Sequence[WorkerPresence]) -> str:
    """All metrics of these workers in Prometheus's text format, version 0.0.4."""
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
