"""The load of experts: counts of a worker, answers to readers, and their sum over workers with its imbalance. No I/O.

Counts are choices: a position makes `top_k` choices in each layer. Counts from other processes are validated: they are
decompressed up to the size of their shape and no further.
"""

import math
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ....schemas.errors import InvalidRequest, RemoteProtocolError
from ....schemas.limits import MAX_EXPERT_CELLS, MAX_EXPERT_VERSIONS
from ....schemas.presence import RoutedExpertsInfo, WorkerPresence
from ....schemas.rows import DTYPES, Rows
from ....schemas.telemetry import COUNT_DTYPE, ExpertCounts, ExpertLoad, TokenTally
from ..fleet.command_result import CommandResult

Counts = npt.NDArray[np.int64]
"""i8[num_layers, num_experts]"""
MAX_CELL: Final = 2**53
"""The largest count in a message. JSON readers decode it exactly, and the sum of a thousand such counts fits into 64
bits."""
LEVEL: Final = 1
"""The zlib level: higher levels take a worker three times as long for a tenth fewer bytes."""
MAX_ASKED: Final = 64
"""The maximum number of workers to ask, because an answer may have 100 KB. This sample represents a thousand
workers."""
INTERVAL_S: Final = 5.0
KEPT_INTERVALS: Final = 24
"""Number of kept intervals, which cover two minutes: a reader that asks for the last minute may be late."""
MAX_PENDING_ROWS: Final = 512
"""Maximum number of rows that wait to be counted. Counting them takes a third of a millisecond. Larger batches are not
faster per row."""
MAX_WAITING_PARTS: Final = 128
"""Maximum number of parts of long prompts that wait to be counted, up to 64 MB. Further ones are counted at once."""
Plane = Literal["prompt", "generated"]
Window = Literal["recent", "versions"]
_ROW: Final[dict[Plane, int]] = {"prompt": 0, "generated": 1}
_ByVersion = OrderedDict[int, npt.NDArray[np.int64]]
"""By weight version, the version that was used last at the end: i8[2, num_cells + 2]. The row of each plane has its
counts, then the number of computed and of seen positions."""


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
    versions = {counts.weight_version for worker in equal for counts in loads[worker].counts}
    newest = sorted(versions, reverse=True)[:MAX_EXPERT_VERSIONS]
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
        for load in decoded:
            before = merged.get(load.weight_version)
            merged[load.weight_version] = load if before is None else before + load
        usable.append(worker)
    if shape is None or not usable:
        return None, left_out
    seconds = max(loads[worker].seconds for worker in usable)
    ordered = tuple(merged[version] for version in newest if version in merged)
    return ExpertWindow(shape, seconds, ordered, tuple(usable)), left_out


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


def _decode(counts: ExpertCounts, shape: ExpertShape) -> VersionLoad:
    def plane(name: str, data: bytes, tally: TokenTally) -> PlaneLoad:
        place = f"{name} of version {counts.weight_version}"
        table = decode_counts(data, shape.num_layers, shape.num_experts, name=place)
        return PlaneLoad(table, tally.computed, tally.seen)

    prompt = plane("prompt", counts.prompt, counts.prompt_tokens)
    return VersionLoad(counts.weight_version, prompt, plane("generated", counts.generated, counts.generated_tokens))


@dataclass(frozen=True, slots=True)
class ExpertAnswers:
    """The answers of one model's workers about their experts."""

    model: str
    """Name of the model."""
    window: ExpertWindow | None
    """The sum of the answers. None: no worker answered with counts."""
    asked: tuple[str, ...]
    """The workers that were asked, sorted: all workers of the model that can answer, or 64 of them."""
    left_out: dict[str, str]
    """Workers that should be in `window` and are not, each with the reason."""
    num_workers: int
    """Live workers of the model, asked or not."""


def choose_workers(
    workers: Sequence[WorkerPresence], named: Iterable[str] | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Choose the workers to ask: the named workers, or a sample that stays the same while its workers are live.

    Args:
        workers: live workers of one model.
        named: these ids; None: any.

    Returns:
        The sorted ids of at most 64 workers, and the reason why each other worker cannot answer.

    Raises:
        InvalidRequest: more than 64 are named.
    """
    meant = {worker.worker: worker for worker in workers}
    if named is not None:
        meant = {name: meant[name] for name in named if name in meant}
        if len(meant) > MAX_ASKED:
            raise InvalidRequest("workers", f"names {len(meant)}", f"up to {MAX_ASKED}, or None for a sample")
    unable = {name: why for name, worker in meant.items() if (why := _why_unable(worker)) is not None}
    able = sorted(meant.keys() - unable.keys(), key=lambda name: (zlib.crc32(name.encode()), name))
    return tuple(sorted(able[:MAX_ASKED])), unable


def _why_unable(worker: WorkerPresence) -> str | None:
    capabilities = worker.capabilities
    if capabilities is None:
        return f"it is {worker.state}"
    if not capabilities.telemetry_reads:
        return "the worker runs an earlier release, which does not answer this command"
    if capabilities.routed_experts is None:
        return f"its engine returns no routed experts{f': {why}' if (why := capabilities.routing_refusal) else ''}"
    return None


def loads_of(result: CommandResult) -> tuple[dict[str, ExpertLoad], dict[str, str]]:
    """Return the answers of the workers to a `read_experts`, and the reason for each missing answer."""
    loads = {worker: ack.experts for worker, ack in result.applied.items() if ack.experts is not None}
    silent = {worker: "its engine returns no routed experts" for worker in result.applied if worker not in loads}
    for acks in (result.failed, result.unsupported, result.stale, result.late):
        for worker, ack in acks.items():
            silent[worker] = f"its last ack is {ack.status}" if ack.error is None else ack.error.message
    return loads, silent | result.missing


def merge_answers(
    model: str, loads: Mapping[str, ExpertLoad], left_out: Mapping[str, str], asked: Sequence[str], num_workers: int
) -> ExpertAnswers:
    """Add up the answers. Name the workers with unusable answers."""
    window, unusable = merge_loads(loads)
    return ExpertAnswers(model, window, tuple(asked), {**left_out, **unusable}, num_workers)


def is_countable(routing: RoutedExpertsInfo) -> bool:
    """Return True if the model has no more experts than a reader accepts."""
    return routing.num_layers * routing.num_experts <= MAX_EXPERT_CELLS


class ExpertBook:
    """The counts of one incarnation of a worker.

    Memory: the planes of `KEPT_INTERVALS` intervals and of `MAX_EXPERT_VERSIONS` versions. For 61 layers of 384 experts
    a plane takes 187 KB.

    It counts how often the router chose each expert, by intervals of 5 s and by weight version. One engine step has few
    rows, so the book counts some hundreds of rows together. The rows of a long prompt wait for `count_some`: all of
    them together would block the caller. Pending and waiting rows are bounded, and are counted before each answer. The
    caller passes in the time, which never goes back. The wall clock numbers the intervals, so that a number has the
    same meaning for all workers of a fleet.

    Args:
        routing: routed experts of the engine's model; `is_countable` must be True for it.
        now: present time in seconds.
        unix_now: the same moment as Unix time.
    """

    def __init__(self, routing: RoutedExpertsInfo, now: float, unix_now: float) -> None:
        self._routing = routing
        self._cells = routing.num_layers * routing.num_experts
        # Index of the first counter of each choice's layer. The type is narrow, because most of the time is needed to
        # add and read these values.
        firsts = np.repeat(np.arange(routing.num_layers) * routing.num_experts, routing.top_k)
        self._firsts = firsts.astype(np.min_scalar_type(self._cells - 1))
        # Added to the given time, so that steps of the wall clock have no effect.
        self._unix_offset = unix_now - now
        self._began_at = unix_now
        self._first_token_at: float | None = None
        self._first = int(unix_now / INTERVAL_S)
        # The last interval that has ended, and the intervals with tokens.
        self._number = self._first - 1
        self._intervals: deque[tuple[int, _ByVersion]] = deque()
        self._totals: _ByVersion = OrderedDict()
        self._open: _ByVersion = OrderedDict()
        self._version = 0
        # The planes of `_version` in the present interval, valid until this time.
        self._present = np.empty((0, 0), np.int64)
        self._present_until = -math.inf
        self._pending: dict[Plane, list[Rows]] = {"prompt": [], "generated": []}
        self._num_pending = 0
        self.waiting: deque[tuple[Plane, Rows]] = deque()
        """Rows of long prompts that wait for `count_some`."""
        # Cached answers by first interval and window. They are valid for the present interval.
        self._answers: dict[tuple[int, Window], ExpertLoad] = {}

    def add_computed(self, plane: Plane, count: int, weight_version: int, now: float) -> None:
        """Add positions that the engine computed, with or without rows."""
        self._planes(weight_version, now)[_ROW[plane], -2] += count

    def add_rows(self, plane: Plane, rows: Rows, weight_version: int, now: float) -> None:
        """Add the rows of computed positions. The caller must not change them later. Rows of another shape are ignored.

        A row with an expert that the model does not have is not counted.
        """
        routing = self._routing
        if rows.shape[1:] != (routing.num_layers, routing.top_k) or rows.dtype != DTYPES[routing.dtype]:
            return
        self._planes(weight_version, now)
        for first in range(0, len(rows), MAX_PENDING_ROWS):
            part = rows[first : first + MAX_PENDING_ROWS]
            if len(part) == MAX_PENDING_ROWS:
                self.waiting.append((plane, part))
                continue
            # The end of a long prompt is copied, so that it does not keep all of the prompt's rows in memory.
            self._pending[plane].append(part.copy() if first else part)
            self._num_pending += len(part)
            if self._num_pending >= MAX_PENDING_ROWS:
                self._count_pending()
        while len(self.waiting) > MAX_WAITING_PARTS:
            self.count_some()

    def count_some(self) -> None:
        """Count the next part of the rows that wait, if there is one. This takes a third of a millisecond."""
        if self.waiting:
            self._count(*self.waiting.popleft())

    def _planes(self, weight_version: int, now: float) -> npt.NDArray[np.int64]:
        """Return the planes of this version in the present interval."""
        if weight_version == self._version and now < self._present_until:
            return self._present
        self._end_intervals(now)
        if weight_version != self._version:
            self._count_all()
            self._version = weight_version
        if self._first_token_at is None:
            self._first_token_at = now + self._unix_offset
        self._present = self._planes_in(self._open, weight_version)
        self._present_until = (self._number + 2) * INTERVAL_S - self._unix_offset
        return self._present

    def _planes_in(self, versions: _ByVersion, weight_version: int) -> npt.NDArray[np.int64]:
        planes = versions.get(weight_version)
        if planes is None:
            planes = versions[weight_version] = np.zeros((len(_ROW), self._cells + 2), np.int64)
            if len(versions) > MAX_EXPERT_VERSIONS:
                versions.popitem(last=False)
        elif next(reversed(versions)) != weight_version:
            versions.move_to_end(weight_version)
        return planes

    def _count_pending(self) -> None:
        """Count the pending rows."""
        pending, self._pending = self._pending, {"prompt": [], "generated": []}
        self._num_pending = 0
        for plane, parts in pending.items():
            if parts:
                self._count(plane, parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _count_all(self) -> None:
        while self.waiting:
            self.count_some()
        self._count_pending()

    def _count(self, plane: Plane, rows: Rows) -> None:
        """Count rows, which belong to `_version` and the open interval."""
        counted = self._planes_in(self._open, self._version)[_ROW[plane]]
        num_experts = self._routing.num_experts
        if num_experts <= np.iinfo(rows.dtype).max and len(rows) and int(rows.max()) >= num_experts:
            rows = rows[(rows < num_experts).all(axis=(1, 2))]
        cells = np.add(rows.reshape(len(rows), self._firsts.size), self._firsts, dtype=self._firsts.dtype)
        counted[:-2] += np.bincount(cells.ravel(), minlength=self._cells)
        counted[-1] += len(rows)

    def _end_intervals(self, now: float) -> None:
        number = int((now + self._unix_offset) / INTERVAL_S) - 1
        if number <= self._number:
            return
        self._count_all()
        if self._open:
            self._add(self._totals, self._open)
            self._intervals.append((self._number + 1, self._open))
            self._open = OrderedDict()
        self._present_until = -math.inf
        self._number = number
        while self._intervals and self._intervals[0][0] <= number - KEPT_INTERVALS:
            self._intervals.popleft()
        self._answers.clear()

    def load(self, since: int, window: Window, now: float) -> ExpertLoad:
        """Return the counts until the end of the last interval. The answer is cached for each interval.

        Args:
            since: for the window `recent`: the interval before the first one to return.
        """
        self._end_intervals(now)
        first = self._first
        if window == "recent":
            first = max(first, since + 1, self._number - KEPT_INTERVALS + 1)
        first = min(first, self._number + 1)
        answer = self._answers.get((first, window))
        if answer is None:
            answer = self._answers[first, window] = self._answer(first, window)
        return answer

    def _answer(self, first: int, window: Window) -> ExpertLoad:
        routing = self._routing
        if window == "recent":
            versions, began_at = self._sum(first), max(first * INTERVAL_S, self._began_at)
        else:
            versions, began_at = self._totals, self._first_token_at or math.inf
        return ExpertLoad(
            number=self._number,
            first=first,
            seconds=round(max((self._number + 1) * INTERVAL_S - began_at, 0.0), 3),
            num_layers=routing.num_layers,
            num_experts=routing.num_experts,
            top_k=routing.top_k,
            counts=tuple(
                ExpertCounts(
                    weight_version=version,
                    prompt=encode_counts(prompt[:-2]),
                    generated=encode_counts(generated[:-2]),
                    prompt_tokens=_tally(prompt),
                    generated_tokens=_tally(generated),
                )
                for version, (prompt, generated) in reversed(versions.items())
                if prompt[-2:].any() or generated[-2:].any()
            ),
        )

    def _sum(self, first: int) -> _ByVersion:
        """Return the sum of the intervals from `first` on."""
        versions: _ByVersion = OrderedDict()
        for number, interval in self._intervals:
            if number >= first:
                self._add(versions, interval)
        return versions

    def _add(self, versions: _ByVersion, others: _ByVersion) -> None:
        for version, planes in others.items():
            self._planes_in(versions, version)[:] += planes


def _tally(plane: npt.NDArray[np.int64]) -> TokenTally:
    return TokenTally(computed=int(plane[-2]), seen=int(plane[-1]))
