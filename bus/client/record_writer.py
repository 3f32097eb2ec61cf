"""Writes the record of a run: a thread writes the rows into parts, so that neither a crash nor the disk stops the run.

A part is an Arrow IPC stream, of which every whole batch is readable after a crash. A part that is full or closed
becomes a parquet file. The file of the writer, `writer-ID.json`, says whether its record is complete.

Columns are only added. Readers take columns by name: a missing column is empty, and an unknown one is ignored.
"""

import atexit
import logging
import os
import threading
import time
import uuid
from asyncio import sleep
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

from ...schemas.checks import check_int, describe
from ...schemas.chunk import FinishReason
from ...schemas.errors import BusClosed, ErrorCode, InvalidRequest, RequestError, request_error
from ...schemas.limits import DEFAULT_MAX_BUFFERED_BYTES
from ...schemas.messages import encode_json
from ...schemas.options import pip_install
from ...schemas.request import GenerateRequest
from ...schemas.sampling import SamplingParams
from ..protocol.stream.result_arrays import TokenMasks
from .generation import Generation, SampleKey
from .thread import FORKED

logger = logging.getLogger(__name__)

Kind = Literal["samples", "experts", "scores", "sessions"]
KINDS: Final[tuple[Kind, ...]] = ("samples", "experts", "scores", "sessions")
"""Kinds of rows. Each kind has files of its own."""

# In the words of pyarrow's `type_for_alias`, with `[x]` for lists.
KEY: Final = {"client": "string", "number": "int64", "child": "int32"}
SCALARS: Final = {
    "request_id": "string",
    "model": "string",
    "prompt_len": "int32",
    "start": "int32",
    "finish_reason": "string",
    "stop_reason": "int32",
    "cached_tokens": "int32",
    "attempts": "int32",
    "parts": "int32",
    "exact": "bool",
    "opened_at": "double",
    "ended_at": "double",
}
"""Fields of a `Generation` that are columns as they are."""
VECTORS: Final = {
    "token_ids": "int32",
    "logprobs": "float",
    "weight_versions": "int32",
    "lora_versions": "int32",
    "kv_mixed": "bool",
}
"""Fields of a `Generation` that are lists, with the type of their items."""
ARRAYS: Final = (
    "top_token_ids",
    "top_logprobs",
    "prompt_logprobs",
    "prompt_top_token_ids",
    "prompt_top_logprobs",
)
"""Fields of a `Generation` that are bytes with a shape and a dtype."""
MASKS: Final = ("mask_counts", "mask_token_ids")
SPANS: Final = ("kv_version_spans", "kv_lora_version_spans")
OF_SESSIONS: Final = {
    **dict.fromkeys(("session", "leaf", "finish_reason", "messages", "forks"), "string"),
    **dict.fromkeys(("reward", "recorded_at"), "double"),
}
"""Columns of a session's sample. `messages` and `forks` are JSON."""
LISTS_OF_SESSIONS: Final = {
    **dict.fromkeys(("token_ids", "weight_versions", "turn_of_token", "attempts"), "int32"),
    **dict.fromkeys(("turns", "joins"), "string"),
    "logprobs": "float",
    "loss_mask": "bool",
}
DERIVED: Final = {
    "lora": "string",
    "num_tokens": "int32",
    "newest_version": "int32",
    "lag": "int32",
    "outcome": "string",
    "group_key": "string",
    "step": "int64",
    "num_siblings": "int32",
}
"""Columns for analyses: the length; the newest version that the fleet had; the versions by which the oldest token is
behind it; `taken`, `dropped` or `failed` with the key and the step of a group; the rows after this one that are
siblings of this sample."""
ROW_BYTES: Final = 512
"""Estimated size of a row without its arrays."""
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


def import_pyarrow() -> Any:
    """Return pyarrow, which only records need.

    Raises:
        InvalidRequest: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as exc:
        problem = f"needs {exc.name}, which is not installed"
        raise InvalidRequest("record", problem, pip_install("data")) from exc
    return pyarrow


def schema_of(kind: Kind) -> Any:
    """Return the Arrow schema of the rows of a kind."""
    pa = import_pyarrow()
    named = pa.type_for_alias
    array = pa.struct([("data", pa.large_binary()), ("dtype", pa.string()), ("shape", pa.list_(pa.int32()))])
    columns = {name: named(alias) for name, alias in KEY.items()}
    if kind == "experts":
        columns |= {"routed_experts": array}
    elif kind == "sessions":
        columns = {name: named(alias) for name, alias in OF_SESSIONS.items()}
        columns |= {name: pa.list_(named(alias)) for name, alias in LISTS_OF_SESSIONS.items()}
        columns |= dict.fromkeys(SPANS, pa.list_(pa.list_(pa.list_(pa.int32())))) | {"routed_experts": array}
    elif kind == "scores":
        metrics = pa.map_(pa.string(), pa.float64())
        columns |= {"scored_at": pa.float64(), "reward": pa.float64(), "advantage": pa.float64(), "metrics": metrics}
    else:
        columns |= {name: named(alias) for name, alias in (SCALARS | DERIVED).items()}
        columns |= {name: pa.list_(named(alias)) for name, alias in VECTORS.items()}
        columns |= dict.fromkeys(("sampling", "request", "error"), pa.string())
        columns |= {"prompt_token_ids": pa.list_(pa.int32()), "worker_ids": pa.list_(pa.string())}
        columns |= dict.fromkeys(SPANS, pa.list_(pa.list_(pa.int32())))
        columns |= dict.fromkeys((*ARRAYS, *MASKS), array)
    return pa.schema(columns)


def sample_row(generation: Generation, newest_version: int | None) -> dict[str, Any]:
    """Return the row of a sample, with copies of its arrays: the caller may change the originals.

    Args:
        newest_version: newest version of the model, or of its adapter, at any worker. None: unknown.
    """
    request, masks = generation.request, generation.sampling_mask
    versions = generation.weight_versions if generation.lora_versions is None else generation.lora_versions
    row: dict[str, Any] = {name: getattr(generation, name) for name in SCALARS}
    row |= {name: np.array(value) for name in VECTORS if (value := getattr(generation, name)) is not None}
    row |= {name: _packed(value) for name in ARRAYS if (value := getattr(generation, name)) is not None}
    row |= {name: getattr(generation, name) for name in (*KEY, *SPANS, "worker_ids", "lora") if name not in KEY}
    if masks is not None:
        row |= dict(zip(MASKS, (_packed(masks.counts), _packed(masks.token_ids)), strict=True))
    if newest_version is not None and len(versions):
        row["lag"] = max(newest_version - int(versions.min()), 0)
    return row | {
        **_key(generation),
        "prompt_token_ids": request.prompt_token_ids,
        "sampling": encode_json(request.sampling).decode(),
        "request": encode_json(_other_fields(request)).decode(),
        "error": None if generation.error is None else encode_json(_error_fields(generation.error)).decode(),
        "num_tokens": len(generation.token_ids),
        "num_siblings": len(generation.siblings),
        "newest_version": newest_version,
    }


def expert_row(generation: Generation) -> dict[str, Any] | None:
    """Return the row of a sample's experts, with a copy of them. None without experts."""
    rows = generation.routed_experts
    return None if rows is None else {**_key(generation), "routed_experts": _packed(rows)}


def row_bytes(row: Mapping[str, Any]) -> int:
    """Return the estimated size of a row in memory."""
    arrays = (value for value in row.values() if isinstance(value, np.ndarray))
    packed = (value for value in row.values() if isinstance(value, dict))
    return ROW_BYTES + sum(array.nbytes for array in arrays) + sum(len(item.get("data", b"")) for item in packed)


def _key(generation: Generation) -> dict[str, Any]:
    return {} if generation.key is None else generation.key._asdict()


def _packed(array: npt.NDArray[Any]) -> dict[str, Any]:
    return {"data": array.tobytes(), "dtype": array.dtype.str, "shape": array.shape}


def _other_fields(request: GenerateRequest) -> dict[str, Any]:
    fields = msgspec.structs.asdict(request)
    del fields["prompt_token_ids"], fields["sampling"]
    return {name: value for name, value in fields.items() if value is not None}


def _error_fields(error: RequestError) -> dict[str, str]:
    details = {name: getattr(error, name, "") for name in ("field", "problem", "allowed")}
    return {"code": str(error.code), "message": error.message, "request_id": error.request_id, **details}


class RecordRow:
    """One row of a batch of rows."""

    def __init__(self, batch: Any, index: int) -> None:
        self._batch = batch
        self._index = index
        self._names = batch.schema.names

    def value(self, name: str) -> Any:
        """Return a value as a Python object. None if it is null or if the batch has no such column."""
        return self._batch.column(name)[self._index].as_py() if name in self._names else None

    def vector(self, name: str) -> "npt.NDArray[Any] | None":
        """Return a list as a writable array. None if it is null or if the batch has no such column."""
        values = self._batch.column(name)[self._index].values if name in self._names else None
        return None if values is None else np.array(values.to_numpy(zero_copy_only=False))

    def array(self, name: str) -> "npt.NDArray[Any] | None":
        """Return bytes with a shape as a writable array. None if they are null or if there is no such column."""
        packed = self.value(name)
        if packed is None:
            return None
        return np.frombuffer(packed["data"], packed["dtype"]).reshape(packed["shape"]).copy()

    @property
    def key(self) -> SampleKey:
        """Key of the sample."""
        return SampleKey(*(self.value(name) for name in KEY))

    def generation(self) -> Generation:
        """Return the sample, without its experts and siblings."""
        fields: dict[str, Any] = {name: value for name in SCALARS if (value := self.value(name)) is not None}
        fields |= {name: self._typed(name, alias) for name, alias in VECTORS.items()}
        fields |= {name: self.array(name) for name in ARRAYS}
        fields |= {name: spans and tuple(map(tuple, spans)) for name in SPANS for spans in [self.value(name)]}
        counts, token_ids = (self.array(name) for name in MASKS)
        if counts is not None and token_ids is not None:
            fields["sampling_mask"] = TokenMasks(counts, token_ids)
        fields["finish_reason"] = FinishReason(fields["finish_reason"])
        return Generation(
            **fields,
            request=self._request(),
            child=self.key.child,
            key=self.key,
            routed_experts=None,
            worker_ids=tuple(self.value("worker_ids") or ()),
            error=self._error(),
        )

    def _typed(self, name: str, alias: str) -> "npt.NDArray[Any] | None":
        vector = self.vector(name)
        return None if vector is None else vector.astype({"float": "f4", "int32": "i4"}.get(alias, alias), copy=False)

    def _request(self) -> GenerateRequest:
        fields = msgspec.json.decode(self.value("request"))
        known = {name: value for name, value in fields.items() if name in GenerateRequest.__struct_fields__}
        sampling = msgspec.json.decode(self.value("sampling"), type=SamplingParams)
        prompt = self._batch.column("prompt_token_ids")[self._index].values.to_numpy()
        return GenerateRequest(prompt_token_ids=prompt, sampling=sampling, **known)

    def _error(self) -> RequestError | None:
        text = self.value("error")
        if text is None:
            return None
        fields = msgspec.json.decode(text)
        return request_error(ErrorCode(fields.pop("code")), fields.pop("message"), **fields)


def with_siblings(first: Generation, siblings: list[Generation]) -> Generation:
    """Return the first sample of a request with the others, which share its request."""
    if not siblings:
        return first
    return replace(first, siblings=tuple(replace(sibling, request=first.request) for sibling in siblings))


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

    def __exit__(self, *_error: object) -> None:
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
            raise InvalidRequest("generation", "was not sent", "a result of a client")
        values = {"reward": reward, "advantage": advantage}
        row = {name: None if value is None else _number(name, value) for name, value in values.items()}
        named = {name: _number(name, value) for name, value in metrics.items()}
        self._put("scores", [{**generation.key._asdict(), **row, "metrics": named, "scored_at": time.time()}])

    def add_session(self, row: Mapping[str, Any], routed_experts: "npt.NDArray[Any] | None" = None) -> None:
        """Record the sample of a session's leaf, with `routed_experts` if this record has experts. This does not wait.

        Columns are those of `schema_of("sessions")`; other fields of the row are not recorded.
        """
        if self.is_open:
            rows = None if routed_experts is None or not self._experts else _packed(routed_experts)
            copy = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
            self._put("sessions", [{**copy, "recorded_at": time.time(), "routed_experts": rows}])
            self.num_samples += 1

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
        raise InvalidRequest(name, f"is {describe(value)}", "a number") from None
