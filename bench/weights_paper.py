"""The table of docs/scaling.md on new weights, with and without deltas. Computed, not measured."""

from dataclasses import dataclass
from typing import Final

from rollbus.bus.protocol.weights.chain import needed_for_chain
from rollbus.schemas.manifest import Link

DELTA_SHARE: Final = 0.025
"""Share of a checkpoint in bfloat16 that a delta has, for a step at a learning rate of 3e-6. docs/performance.md lists
the shares by step."""
WORKERS_PER_MACHINE: Final = 4
FLEETS: Final = (64, 1000)
SERVER_BYTES_PER_S: Final = 1e9
"""Bytes per second that one server sends."""
UPLOAD_BYTES_PER_S: Final = 0.5e9
"""Bytes per second that one process uploads into the store."""
COMPARE_BYTES_PER_S: Final = 1e9
"""Bytes per second that one core of the trainer compares and encodes."""
BUILD_BYTES_PER_S: Final = 0.5e9
"""Bytes per second at which a machine builds a folder from the previous one.

It reads, changes, hashes and writes the whole checkpoint.
"""


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    num_bytes: float


MODELS: Final = (_Model("0.6B", 1.19e9), _Model("30B-A3B", 61.1e9))


def weights_rows() -> list[list[str]]:
    """Return the head and the rows of the table, with a column for each model and fleet."""
    cases = [(model, workers) for model in MODELS for workers in FLEETS]
    names = [name for name, _ in _figures(*cases[0])]
    figures = [[text for _, text in _figures(*case)] for case in cases]
    head = ["one version", *(f"{model.name}, {workers:,} workers" for model, workers in cases)]
    return [head, *(list(line) for line in zip(names, *figures, strict=True))]


def _figures(model: _Model, workers: int) -> list[tuple[str, str]]:
    machines, full, delta = workers / WORKERS_PER_MACHINE, model.num_bytes, model.num_bytes * DELTA_SHARE
    return [
        ("machines", f"{machines:,.0f}"),
        ("whole, for each worker: the server sends", _bytes(workers * full)),
        ("time for that", _time(workers * full / SERVER_BYTES_PER_S)),
        ("whole, once for each machine: the server sends", _bytes(machines * full)),
        ("time for that", _time(machines * full / SERVER_BYTES_PER_S)),
        ("upload of the whole checkpoint by the trainer", _time(full / UPLOAD_BYTES_PER_S)),
        ("**delta, once for each machine: the server sends**", f"**{_bytes(machines * delta)}**"),
        ("**time for that**", f"**{_time(machines * delta / SERVER_BYTES_PER_S)}**"),
        ("comparison by the trainer, on one core", _time(full / COMPARE_BYTES_PER_S)),
        ("upload of the delta, at the same time", _time(delta / UPLOAD_BYTES_PER_S)),
        ("build of the folder on each machine", _time(full / BUILD_BYTES_PER_S)),
        (
            "size of the bucket, for two anchors and the deltas between them",
            _bytes(needed_for_chain([_largest(model)])),
        ),
    ]


def _largest(model: _Model) -> Link:
    """Return a version with an anchor and a delta."""
    return Link(
        objects="b/versions/1-1-00000000",
        version=1,
        digest="0" * 64,
        anchor_bytes=int(model.num_bytes),
        delta_bytes=int(model.num_bytes * DELTA_SHARE),
    )


def _bytes(count: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("MB", 1e6), ("GB", 1e9)) if count < 1000 * size), ("TB", 1e12))
    return f"{count / size:.3g} {unit}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
