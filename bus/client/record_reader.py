"""Reads the record of a run, without a worker, also while the run writes it or after it was killed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...schemas.errors import InvalidRequest
from .generation import Generation, SampleKey
from .record_writer import KEY, KINDS, Kind, RecordRow, WriterFile, import_pyarrow, with_siblings

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a part that was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScore:
    """The numbers that the trainer recorded for one sample."""

    reward: float | None = None
    """Reward. None: not recorded."""
    advantage: float | None = None
    """Advantage. None: not recorded."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers by name."""


def read_record(folder: str | os.PathLike[str]) -> "RunRecord":
    """Return the record of a run. This reads the keys of all samples and all scores.

    Raises:
        InvalidRequest: the folder has no record, or pyarrow is not installed.
    """
    return RunRecord(folder)


class RunRecord:
    """The samples of a run. Iterate over it for the same `Generation`s that the client returned; see `read_record`.

    Memory holds the keys, the scores and one batch. Samples with n > 1 have their siblings, as from `complete`. If a
    sample was recorded twice, the last complete row counts.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        import_pyarrow()
        self.folder = Path(folder)
        """The record's directory."""
        self.torn_bytes = 0
        """Bytes of parts after their last whole batch, which a crash left. They are not readable."""
        self.problems: list[str] = []
        """One sentence for each file that is torn or not readable, and for each writer that failed or did not close."""
        self._parts = {kind: _parts_of(self.folder, kind) for kind in KINDS}
        if not any(self._parts.values()) and not any(self.folder.glob("writer-*.json")):
            problem = f"is {os.fspath(folder)!r}, which has no record of a run"
            raise InvalidRequest("folder", problem, "a folder that `Client.record` wrote")
        self._check_files()
        self._samples = self._index("samples")
        self._experts = self._index("experts")
        self._scores = self._read_scores()
        # The part of experts that is being read: its batches, the number of the first row of the present one, and it.
        self._part: tuple[str, Iterator[Any]] | None = None
        self._first = 0
        self._batch: Any = None

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<RunRecord {self.folder} samples={self.num_samples} problems={len(self.problems)}>"

    @property
    def num_samples(self) -> int:
        """Number of samples, including siblings."""
        return len(self._samples)

    def __iter__(self) -> Iterator[Generation]:
        """Yield the samples in the order in which each writer recorded them."""
        for part, first, batch in self._batches("samples"):
            index = 0
            while index < batch.num_rows:
                row = RecordRow(batch, index)
                end = index + 1 + (row.value("num_siblings") or 0)
                if self._samples.get(row.key) == (part, first + index):
                    rows = (RecordRow(batch, sibling) for sibling in range(index + 1, end))
                    siblings = [self._with_experts(sibling.generation()) for sibling in rows]
                    yield with_siblings(self._with_experts(row.generation()), siblings)
                index = end

    def sessions(self) -> Iterator[dict[str, Any]]:
        """Yield the samples of sessions that `AgentSession.record` wrote: lists, and experts as an array or None."""
        for _, _, batch in self._batches("sessions"):
            for index in range(batch.num_rows):
                row = RecordRow(batch, index)
                found = {name: row.value(name) for name in batch.schema.names}
                yield {**found, "routed_experts": row.array("routed_experts")}

    def score_of(self, generation: Generation) -> SampleScore:
        """Return the numbers that were recorded for a sample of this record."""
        return SampleScore() if generation.key is None else self._scores.get(generation.key, SampleScore())

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of numbers with a value for each sample: NaN where a sample has none.

        Args:
            name: `num_tokens`, `lag`, `opened_at`, `ended_at`, `newest_version`, `attempts`, and other columns of
                numbers; or `reward` or `advantage`.
        """
        found: list[float] = []
        for part, first, batch in self._batches("samples", *KEY, name):
            for index, key in enumerate(_keys(batch)):
                if self._samples.get(key) == (part, first + index):
                    score = self._scores.get(key, SampleScore())
                    is_score = name in ("reward", "advantage")
                    value = getattr(score, name) if is_score else RecordRow(batch, index).value(name)
                    found.append(np.nan if value is None else value)
        return np.array(found, float)

    def _check_files(self) -> None:
        """Find the problems of the files."""
        for path in sorted(self.folder.glob("writer-*.json")):
            try:
                writer = msgspec.json.decode(path.read_bytes(), type=WriterFile)
            except msgspec.DecodeError as exc:
                self.problems.append(f"{path.name} is not readable: {exc}")
                continue
            if writer.state == "failed":
                self.problems.append(f"{path.name}: the record failed and lost {writer.num_lost} rows: {writer.error}")
            elif writer.state == "open":
                self.problems.append(f"{path.name}: process {writer.pid} is still writing, or was killed")
        for path in (path for paths in self._parts.values() for path in paths):
            try:
                torn = _torn_bytes(path)
            except FileNotFoundError:
                continue  # converted since it was listed
            if torn:
                self.torn_bytes += torn
                self.problems.append(f"{path.name}: {torn} bytes after the last whole batch are not readable")

    def _index(self, kind: Kind) -> dict[SampleKey, tuple[str, int]]:
        found: dict[SampleKey, tuple[str, int]] = {}
        for part, first, batch in self._batches(kind, *KEY):
            found |= {key: (part, first + index) for index, key in enumerate(_keys(batch))}
        return found

    def _read_scores(self) -> dict[SampleKey, SampleScore]:
        rows = []
        for _, _, batch in self._batches("scores"):
            rows += [(row.value("scored_at"), row.key, row) for row in (RecordRow(batch, i) for i in range(len(batch)))]
        scores: dict[SampleKey, SampleScore] = {}
        for _, key, row in sorted(rows, key=lambda item: item[0]):
            earlier = scores.get(key, SampleScore())
            named = {name: value for name in ("reward", "advantage") if (value := row.value(name)) is not None}
            metrics = {**earlier.metrics, **dict(row.value("metrics") or ())}
            scores[key] = replace(earlier, **named, metrics=metrics)
        return scores

    def _with_experts(self, generation: Generation) -> Generation:
        place = None if generation.key is None else self._experts.get(generation.key)
        if place is None:
            return generation
        part, number = place
        if self._part is None or self._part[0] != part or number < self._first:
            path = next(path for path in self._parts["experts"] if path.stem == part)
            self._part, self._first, self._batch = (part, _read_part(path)), 0, None
        while self._batch is None or number >= self._first + self._batch.num_rows:
            self._first += 0 if self._batch is None else self._batch.num_rows
            self._batch = next(self._part[1])
        return replace(generation, routed_experts=RecordRow(self._batch, number - self._first).array("routed_experts"))

    def _batches(self, kind: Kind, *columns: str) -> Iterator[tuple[str, int, Any]]:
        """Yield the whole batches of a kind, each with its part and the number of its first row there.

        Args:
            columns: columns to read. None: all.
        """
        for path in self._parts[kind]:
            first = 0
            for batch in _read_part(path, columns):
                yield path.stem, first, batch
                first += batch.num_rows


def _keys(batch: Any) -> list[SampleKey]:
    return [SampleKey(*key) for key in zip(*(batch.column(name).to_pylist() for name in KEY), strict=True)]


def _parts_of(folder: Path, kind: Kind) -> list[Path]:
    """Return the parts of a kind. A crash during the conversion leaves both files of a part; the parquet is whole."""
    parts = {path.stem: path for path in folder.glob(f"{kind}-*.arrow")}
    parts |= {path.stem: path for path in folder.glob(f"{kind}-*.parquet")}
    return [parts[stem] for stem in sorted(parts)]


def _read_part(path: Path, columns: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the whole batches of a part."""
    import pyarrow.parquet as pq

    if path.suffix == ".arrow":
        try:
            yield from _read_stream(path)
        except FileNotFoundError:
            path = path.with_suffix(".parquet")  # converted since it was listed
        else:
            return
    with pq.ParquetFile(path, memory_map=True) as file:
        names = [name for name in columns if name in file.schema_arrow.names] if columns else None
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=names).combine_chunks()


def _read_stream(path: Path, ends: list[int] | None = None) -> Iterator[Any]:
    """Yield the whole batches of an Arrow IPC stream, and append the position after each to `ends`."""
    import pyarrow as pa

    if not path.stat().st_size:
        return
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_stream(source)
        except (pa.ArrowException, OSError):
            return
        while True:
            if ends is not None:
                ends.append(source.tell())
            try:
                batch = reader.read_next_batch()
            except (StopIteration, pa.ArrowException, OSError):
                return
            yield batch


def _torn_bytes(path: Path) -> int:
    if path.suffix != ".arrow":
        return 0
    ends = [0]
    for _ in _read_stream(path, ends):
        pass
    with path.open("rb") as file:
        file.seek(ends[-1])
        is_closed = file.read(len(END_OF_STREAM) + 1) == END_OF_STREAM
    return 0 if is_closed else path.stat().st_size - ends[-1]
