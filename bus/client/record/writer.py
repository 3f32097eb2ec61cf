"""Writes the record of a run: a thread writes the rows into parts, so that neither a crash nor the disk stops the run.

A part is an Arrow IPC stream, of which every whole batch is readable after a crash. A part that is full or closed
becomes a parquet file. The file of the writer, `writer-ID.json`, says whether its record is complete.
"""

import atexit
import logging
import os
import threading
import time
import uuid
from asyncio import sleep
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from ....schemas.checks import check_int, describe
from ....schemas.errors import BusClosed, InvalidRequest
from ....schemas.limits import DEFAULT_MAX_BUFFERED_BYTES
from ..generation import Generation
from ..loop_thread import FORKED
from .columns import KINDS, Kind, expert_row, import_pyarrow, row_bytes, sample_row, schema_of

__all__ = ["RunRecorder", "WriterFile"]

logger = logging.getLogger(__name__)

FLUSH_S: Final = 5.0
"""Seconds. Rows that are older are on the disk."""
BATCH_BYTES: Final = 64 * 1024**2
"""Bytes of waiting rows above which they are written before `FLUSH_S`. Also the most bytes of a batch with more than
one sample, and of a row group."""
PART_BYTES: Final = 256 * 1024**2
"""Bytes above which a part is closed. The thread converts a full part in about a second."""
ROOM_S: Final = 0.02
"""Seconds between two checks of a caller that waits for the disk, which writes a batch in longer time."""
WRITER_FILE_BYTES: Final = 1024
"""Size of the file of a writer. It does not grow: a full disk must still take the mark of the failure."""

Rows = list[dict[str, Any]]


class WriterFile(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state of one writer, in `writer-ID.json`. If the state is `open`, the writer is running or was killed."""

    state: str = "open"
    """`open`, `closed` or `failed`."""
    error: str = ""
    """Cause of a failure."""
    num_lost: int = 0
    """Number of rows that were not written before the failure."""
    pid: int = 0

    def write(self, path: Path) -> None:
        """Write the file in place, with a fixed size."""
        path.touch()
        with path.open("r+b") as file:
            short = msgspec.structs.replace(self, error=self.error[:256])
            file.write(msgspec.json.encode(short).ljust(WRITER_FILE_BYTES - 1)[: WRITER_FILE_BYTES - 1] + b"\n")


class RunRecorder:
    """Writes a row for each sample into a folder. `Client.record` creates it for the results of a client.

    Several writers, also of several processes, may write to one folder: each has files of its own. Any thread may use a
    recorder. If the disk fails, the record ends: the recorder logs one warning, marks the folder and discards further
    rows. The run continues.

    Args:
        folder: folder of the record. It is created if it is missing.
        experts: True: also record the routed experts, in files of their own.
        max_buffered_bytes: bytes of rows that are not on the disk yet, above which callers wait for their results.

    Raises:
        InvalidRequest: pyarrow is not installed, or a value is not valid.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        experts: bool = False,
        max_buffered_bytes: int = DEFAULT_MAX_BUFFERED_BYTES,
    ) -> None:
        import_pyarrow()
        self.folder = Path(folder)
        """The record's directory."""
        self.error: Exception | None = None
        """Error of the disk that ended the record. None if there was none."""
        self.num_samples = 0
        """Number of samples that were recorded."""
        self._experts = experts
        self._max_bytes = check_int("max_buffered_bytes", max_buffered_bytes, 1, 2**63)
        self._batch_bytes = min(BATCH_BYTES, self._max_bytes)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        # Rows that belong together, with their size. `_max_bytes` and the results of one step bound them.
        self._waiting: dict[Kind, deque[tuple[Rows, int]]] = {kind: deque() for kind in KINDS}
        self._num_bytes = 0
        self._is_closing = False
        self._has_ended = False
        name = uuid.uuid4().hex[:12]
        self._file = self.folder / f"writer-{name}.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        WriterFile(pid=self._pid).write(self._file)
        self._parts = {kind: _Parts(self.folder, kind, name) for kind in KINDS}
        self._thread = threading.Thread(target=self._run, name="rollbus-record", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __repr__(self) -> str:
        """Return one line with the state."""
        state = "failed" if self.error else "closed" if self._is_closing else "open"
        return f"<RunRecorder {self.folder} {state} samples={self.num_samples} buffered_bytes={self._num_bytes}>"

    def __enter__(self) -> Self:
        """Return this recorder."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the record."""
        self.close()

    @property
    def is_open(self) -> bool:
        """True until the record is closed or has failed."""
        return not (self._is_closing or self._has_ended)

    async def wait_for_room(self) -> None:
        """Wait while more than `max_buffered_bytes` are not on the disk yet, unless the record has ended."""
        while self._num_bytes > self._max_bytes and self.is_open:  # noqa: ASYNC110 - callers are in several loops
            await sleep(ROOM_S)

    def add(
        self, generation: Generation, *, newest_version: int | None = None, group: dict[str, Any] | None = None
    ) -> None:
        """Record a sample and its siblings. This copies them and does not wait.

        If the request was not sent, or if the record has ended, this has no effect.

        Args:
            newest_version: newest version of the model, or of its adapter, at any worker. None: unknown.
            group: columns of the group of the sample.
        """
        if generation.key is None or not self.is_open:
            return
        samples = (generation, *generation.siblings)
        rows = [sample_row(sample, newest_version) | (group or {}) for sample in samples]
        self._put("samples", rows)
        self.num_samples += len(rows)
        if self._experts:
            for row in map(expert_row, samples):
                if row is not None:
                    self._put("experts", [row])

    def score(
        self, generation: Generation, *, reward: float | None = None, advantage: float | None = None, **metrics: float
    ) -> None:
        """Record the reward, the advantage or further numbers of a sample, at any time after its result.

        Each call adds to the earlier ones. Of two values with the same name, the later one counts. If the disk has
        failed, this has no effect.

        Raises:
            BusClosed: the record is closed, or belongs to the parent of this forked process.
            InvalidRequest: a value is not a number, or the request of the sample was not sent.
        """
        if self._is_closing:
            raise BusClosed(f"the record in {self.folder} is closed")
        if os.getpid() != self._pid:
            raise BusClosed(FORKED)
        if generation.key is None:
            raise InvalidRequest(field="generation", problem="was not sent", allowed="a result of a client")
        values = {"reward": reward, "advantage": advantage}
        row = {name: None if value is None else _number(name, value) for name, value in values.items()}
        named = {name: _number(name, value) for name, value in metrics.items()}
        self._put("scores", [{**generation.key._asdict(), **row, "metrics": named, "scored_at": time.time()}])

    def close(self) -> None:
        """Write all rows, convert the parts to parquet, and end the record. This blocks. It may be called again."""
        atexit.unregister(self.close)
        if os.getpid() == self._pid:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._thread.join()

    def _put(self, kind: Kind, rows: Rows) -> None:
        size = sum(map(row_bytes, rows))
        with self._changed:
            if self._has_ended:
                return
            self._waiting[kind].append((rows, size))
            self._num_bytes += size
            if self._num_bytes >= self._batch_bytes:
                self._changed.notify_all()

    def _run(self) -> None:
        taken: Rows = []
        try:
            is_last = False
            while not is_last:
                with self._changed:
                    self._changed.wait_for(self._is_due, timeout=FLUSH_S)
                    is_last = self._is_closing
                for kind, parts in self._parts.items():
                    while (batch := self._take(kind))[0]:
                        taken = batch[0]
                        parts.write(taken)
                        taken = []
                        with self._changed:
                            self._num_bytes -= batch[1]
            for parts in self._parts.values():
                parts.finish()
            WriterFile(state="closed", pid=self._pid).write(self._file)
        except Exception as exc:  # noqa: BLE001
            # Boundary of the record: whatever ends it, the run continues.
            self._fail(exc, taken)
        finally:
            self._has_ended = True

    def _is_due(self) -> bool:
        return self._is_closing or self._num_bytes >= self._batch_bytes

    def _take(self, kind: Kind) -> tuple[Rows, int]:
        """Remove rows for one batch, whole results only. Return them with their size."""
        rows: Rows = []
        total = 0
        with self._changed:
            waiting = self._waiting[kind]
            while waiting and (not rows or total + waiting[0][1] <= BATCH_BYTES):
                together, size = waiting.popleft()
                rows += together
                total += size
        return rows, total

    def _fail(self, error: Exception, taken: Rows) -> None:
        with self._changed:
            self._has_ended = True
            self.error = error
            lost = len(taken) + sum(len(rows) for waiting in self._waiting.values() for rows, _ in waiting)
            for waiting in self._waiting.values():
                waiting.clear()
            self._num_bytes = 0
        logger.warning("record.failed folder=%s lost_rows=%d error=%s", self.folder, lost, error)
        try:
            WriterFile(state="failed", error=str(error), num_lost=lost, pid=self._pid).write(self._file)
        except OSError:
            logger.debug("record.mark_failed folder=%s", self.folder, exc_info=True)


class _Parts:
    """The parts of one kind of rows of one writer, one after the other. Only the thread of the writer uses it."""

    def __init__(self, folder: Path, kind: Kind, writer: str) -> None:
        self._name = f"{kind}-{writer}"
        self._folder = folder
        self._schema = schema_of(kind)
        self._number = 0
        self._size = 0
        # Set while a part is open.
        self._path: Path | None = None
        self._sink: Any = None
        self._stream: Any = None

    def write(self, rows: Rows) -> None:
        """Write one batch to the disk, and finish the part if it is full."""
        pa = import_pyarrow()
        batch = pa.RecordBatch.from_pylist(rows, schema=self._schema)
        if self._path is None:
            self._path = self._folder / f"{self._name}-{self._number:05}.arrow"
            self._number += 1
            self._sink = pa.OSFile(str(self._path), "wb")
            self._stream = pa.ipc.new_stream(self._sink, self._schema)
        self._stream.write_batch(batch)
        _sync(self._path)
        self._size += batch.nbytes
        if self._size >= PART_BYTES:
            self.finish()

    def finish(self) -> None:
        """Close the open part and convert it to parquet."""
        if self._path is None:
            return
        self._stream.close()
        self._sink.close()
        path, self._path, self._size = self._path, None, 0
        _convert(path)


def _convert(path: Path) -> None:
    """Replace a whole part by a parquet file. A crash leaves the part, or both; readers then take the parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draft = path.with_suffix(".draft")
    with (
        pa.memory_map(str(path)) as source,
        pa.ipc.open_stream(source) as reader,
        pq.ParquetWriter(draft, reader.schema, compression="zstd") as writer,
    ):
        group: list[Any] = []
        size = 0
        for batch in reader:
            if group and size + batch.nbytes > BATCH_BYTES:
                _write_group(writer, group)
                group, size = [], 0
            group.append(batch)
            size += batch.nbytes
        _write_group(writer, group)
    _sync(draft)
    draft.rename(path.with_suffix(".parquet"))
    path.unlink()


def _write_group(writer: Any, batches: list[Any]) -> None:
    import pyarrow as pa

    table = pa.Table.from_batches(batches)
    writer.write_table(table, row_group_size=table.num_rows)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidRequest(field=name, problem=f"is {describe(value)}", allowed="a number") from None
