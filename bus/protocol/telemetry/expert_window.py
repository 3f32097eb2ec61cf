"""Validates the workers' answers about experts, adds them over workers and time, and measures imbalance. No I/O.

Counts are choices: a position makes `top_k` choices in each layer. Counts from other processes are validated: they are
decompressed up to the size of their shape and no further.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....schemas.errors import RemoteProtocolError
from ....schemas.limits import MAX_EXPERT_CELLS, MAX_EXPERT_VERSIONS
from ....schemas.telemetry import COUNT_DTYPE, ExpertCounts, ExpertLoad, TokenTally

__all__ = [
    "Counts",
    "ExpertShape",
    "ExpertWindow",
    "Imbalance",
    "ImbalanceSummary",
    "PlaneLoad",
    "VersionLoad",
    "add_windows",
    "decode_counts",
    "encode_counts",
    "imbalance",
    "merge_loads",
]

Counts = npt.NDArray[np.int64]
"""i8[num_layers, num_experts]"""
MAX_CELL: Final = 2**53
"""The largest count in a message. JSON readers decode it exactly, and the sum of a thousand such counts fits into 64
bits."""
LEVEL: Final = 1
"""The zlib level: higher levels take a worker three times as long for a tenth fewer bytes."""


class ExpertShape(NamedTuple):
    """The shape of a model's routed experts."""

    num_layers: int
    num_experts: int
    top_k: int

    @property
    def cells(self) -> int:
        """The number of counters of one plane."""
        return self.num_layers * self.num_experts

    def __str__(self) -> str:
        return f"{self.num_layers} layers x {self.num_experts} experts, top {self.top_k}"


@dataclass(frozen=True, slots=True, eq=False)
class PlaneLoad:
    """Choices of prompt positions, or of generated tokens."""

    counts: Counts
    computed: int = 0
    """Positions that engines computed."""
    seen: int = 0
    """The computed positions that are in `counts`."""

    @property
    def share_seen(self) -> float | None:
        """The share of the computed positions that is in `counts`. None: no position was computed."""
        return min(self.seen / self.computed, 1.0) if self.computed else None

    def __add__(self, other: "PlaneLoad") -> "PlaneLoad":
        return PlaneLoad(self.counts + other.counts, self.computed + other.computed, self.seen + other.seen)


@dataclass(frozen=True, slots=True, eq=False)
class VersionLoad:
    """The load under one weight version."""

    weight_version: int
    prompt: PlaneLoad
    generated: PlaneLoad

    def __add__(self, other: "VersionLoad") -> "VersionLoad":
        return VersionLoad(self.weight_version, self.prompt + other.prompt, self.generated + other.generated)


@dataclass(frozen=True, eq=False)
class ExpertWindow:
    """The load of experts of some workers of one model over some time."""

    shape: ExpertShape
    seconds: float
    """Seconds that the longest answer covers."""
    versions: tuple[VersionLoad, ...]
    """The highest version first. Versions without tokens are left out."""
    workers: tuple[str, ...]
    """The workers whose counts these are, sorted."""

    @cached_property
    def prompt(self) -> PlaneLoad:
        """The load of prompt positions over all versions."""
        return sum((version.prompt for version in self.versions), empty_plane(self.shape))

    @cached_property
    def generated(self) -> PlaneLoad:
        """The load of generated tokens over all versions."""
        return sum((version.generated for version in self.versions), empty_plane(self.shape))


class ImbalanceSummary(NamedTuple):
    """A summary of all layers that route. Without such layers, it has the values of even layers."""

    max_over_mean: float
    """The mean over the layers."""
    worst: float
    """The largest `max_over_mean` of a layer."""
    entropy: float
    """The mean over the layers."""
    unused: int
    """The number of experts without a choice, over all layers."""


class Imbalance(NamedTuple):
    """The imbalance of each layer.

    A layer that does not route, or has no choice yet, has the values of an even layer.
    """

    max_over_mean: npt.NDArray[np.float64]
    """f8[num_layers]: the choices of the busiest expert divided by an even share. 1 means even."""
    entropy: npt.NDArray[np.float64]
    """f8[num_layers]: the entropy of the shares, divided by that of even shares. 1 means even. 0 means that one expert
    has all."""
    unused: npt.NDArray[np.int32]
    """i4[num_layers]: experts without a choice."""
    routes: npt.NDArray[np.bool_]
    """?[num_layers]: True if the layer has choices and is not dense. For dense layers, engines return only expert 0."""

    def summary(self) -> ImbalanceSummary:
        """Return a summary of all layers that route."""
        if not self.routes.any():
            return ImbalanceSummary(1.0, 1.0, 1.0, 0)
        ratios = self.max_over_mean[self.routes]
        entropy, unused = self.entropy[self.routes], self.unused[self.routes]
        return ImbalanceSummary(float(ratios.mean()), float(ratios.max()), float(entropy.mean()), int(unused.sum()))


def empty_plane(shape: ExpertShape) -> PlaneLoad:
    """Return a plane without counts."""
    return PlaneLoad(np.zeros((shape.num_layers, shape.num_experts), np.int64))


def encode_counts(counts: npt.NDArray[Any]) -> bytes:
    """Return counts in the format of `ExpertCounts`: empty if all are 0."""
    return zlib.compress(counts.astype(COUNT_DTYPE).tobytes(), LEVEL) if counts.any() else b""


def decode_counts(data: bytes, num_layers: int, num_experts: int, *, name: str = "counts") -> Counts:
    """Decode the result of `encode_counts`. This uses at most the memory of the given shape.

    Args:
        name: name of the field, for errors.

    Raises:
        RemoteProtocolError: the data has another size, is not valid zlib, or has a count above 2**53.
    """
    cells = num_layers * num_experts
    if cells > MAX_EXPERT_CELLS:
        raise RemoteProtocolError(
            f"{name} has {num_layers} x {num_experts} = {cells} cells; allowed: up to {MAX_EXPERT_CELLS}"
        )
    if not data:
        return np.zeros((num_layers, num_experts), np.int64)
    size = cells * np.dtype(COUNT_DTYPE).itemsize
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data, size + 1)
    except zlib.error as exc:
        raise RemoteProtocolError(f"{name} is no zlib: {exc}") from exc
    if len(raw) != size or not inflater.eof or inflater.unused_data:
        found = f"more than {size}" if len(raw) > size else f"{len(raw)}"
        raise RemoteProtocolError(
            f"{name} has {found} bytes; allowed: {size}, one zlib stream of {COUNT_DTYPE}[{num_layers}, {num_experts}]"
        )
    counts = np.frombuffer(raw, COUNT_DTYPE).reshape(num_layers, num_experts)
    if int(counts.max()) > MAX_CELL:
        raise RemoteProtocolError(f"{name} has the count {int(counts.max())}; allowed: up to 2**53")
    return counts.astype(np.int64)


def merge_loads(loads: Mapping[str, ExpertLoad]) -> tuple[ExpertWindow | None, dict[str, str]]:
    """Add up the answers of these workers of one model, for the 8 highest weight versions.

    Returns:
        The sum, or None without a worker. Also the reason for each worker that is left out. There are three: its answer
        is unusable, its routed experts have another shape than those of most workers, or all of its versions are older
        than the 8 highest.
    """
    left_out: dict[str, str] = {}
    shapes = {worker: ExpertShape(load.num_layers, load.num_experts, load.top_k) for worker, load in loads.items()}
    ranked = Counter(shape for shape in shapes.values() if shape.cells <= MAX_EXPERT_CELLS).most_common(1)
    shape = ranked[0][0] if ranked else None
    equal = sorted(worker for worker in loads if shapes[worker] == shape)
    for worker in loads.keys() - set(equal):
        left_out[worker] = f"its routed experts have the shape {shapes[worker]}; allowed: {shape or 'fewer cells'}"
    newest = _newest(counts.weight_version for worker in equal for counts in loads[worker].counts)
    merged: dict[int, VersionLoad] = {}
    usable: list[str] = []
    for worker in equal:
        try:
            decoded = [
                _decode(counts, shapes[worker]) for counts in loads[worker].counts if counts.weight_version in newest
            ]
        except RemoteProtocolError as exc:
            left_out[worker] = str(exc)
            continue
        if loads[worker].counts and not decoded:
            left_out[worker] = f"other workers have {MAX_EXPERT_VERSIONS} versions that are higher than all of its own"
            continue
        _add(merged, decoded)
        usable.append(worker)
    if shape is None or not usable:
        return None, left_out
    seconds = max(loads[worker].seconds for worker in usable)
    return ExpertWindow(shape, seconds, _sorted(merged), tuple(usable)), left_out


def add_windows(windows: Iterable[ExpertWindow]) -> ExpertWindow | None:
    """Join consecutive windows. Return None without a window.

    Windows with another shape than the last window are left out, because another model was loaded since.
    """
    found = list(windows)
    if not found:
        return None
    last = found[-1]
    alike = [window for window in found if window.shape == last.shape]
    newest = _newest(version.weight_version for window in alike for version in window.versions)
    merged: dict[int, VersionLoad] = {}
    for window in alike:
        _add(merged, (version for version in window.versions if version.weight_version in newest))
    return ExpertWindow(
        shape=last.shape,
        seconds=sum(window.seconds for window in alike),
        versions=_sorted(merged),
        workers=tuple(sorted({worker for window in alike for worker in window.workers})),
    )


def imbalance(counts: npt.NDArray[Any], top_k: int) -> Imbalance:
    """Return the imbalance of each layer.

    Args:
        top_k: choices of a position in each layer. They are distinct, so with more than one, no layer that routes uses
            a single expert. A layer whose choices are all expert 0 is dense.
    """
    num_experts = counts.shape[1]
    # Sums of large counts from other processes do not fit into 64 bits.
    counts = counts.astype(np.float64)
    totals = counts.sum(axis=1)
    routes = totals > 0
    if top_k > 1:
        routes &= counts[:, 0] < totals
    safe = np.where(routes, totals, 1).astype(np.float64)
    ratios = np.where(routes, counts.max(axis=1) * num_experts / safe, 1.0)
    shares = counts / safe[:, None]
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    bits = -(shares * logs).sum(axis=1)
    entropy = np.where(routes & (num_experts > 1), bits / np.log(max(num_experts, 2)), 1.0)
    unused = np.where(routes, (counts == 0).sum(axis=1), 0)
    return Imbalance(ratios, np.clip(entropy, 0.0, 1.0), unused.astype(np.int32), routes)


def _newest(versions: Iterable[int]) -> frozenset[int]:
    return frozenset(sorted(set(versions), reverse=True)[:MAX_EXPERT_VERSIONS])


def _add(merged: dict[int, VersionLoad], versions: Iterable[VersionLoad]) -> None:
    for version in versions:
        before = merged.get(version.weight_version)
        merged[version.weight_version] = version if before is None else before + version


def _sorted(merged: dict[int, VersionLoad]) -> tuple[VersionLoad, ...]:
    return tuple(merged[version] for version in sorted(merged, reverse=True))


def _decode(counts: ExpertCounts, shape: ExpertShape) -> VersionLoad:
    version = counts.weight_version
    return VersionLoad(
        version,
        _plane(counts.prompt, counts.prompt_tokens, shape, f"prompt of version {version}"),
        _plane(counts.generated, counts.generated_tokens, shape, f"generated of version {version}"),
    )


def _plane(data: bytes, tally: TokenTally, shape: ExpertShape, name: str) -> PlaneLoad:
    counts = decode_counts(data, shape.num_layers, shape.num_experts, name=name)
    return PlaneLoad(counts, tally.computed, tally.seen)
