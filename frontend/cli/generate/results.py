"""Writes the results of `rollbus generate`: JSONL, one line for each prompt, in the order in which requests end.

A second run uses every complete line. It cuts off an incomplete last line, which a crash may leave, and removes the
lines of prompts that failed or whose rows are missing. Then it appends to the other lines.

The routed experts of many results go into one `.npz`, and results may go into one parquet file. Both are readable only
after their end is written. So during the run each array is a file in a folder beside the `.npz`
(`NAME.npz.partial/KEY.npy`), and the results of a parquet file are lines of JSON beside it
(`NAME.parquet.part.jsonl`). At the end, even after an error, all of them become a new file, which replaces the old one
as a whole. After a crash, the next run uses what is there. The lines are removed after a run in which each prompt has
its result.
"""

import base64
import fcntl
import os
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from ....bus import Generation
from ....schemas.chunk import json_logprobs
from ....schemas.decoding import JsonObject
from ....schemas.errors import InvalidRequest, RequestError
from ....schemas.rows import Float32s, Rows, dtype_of
from ...tokenization import Tokenizer
from ..exits import CommandFailed, WrongUsage
from .inputs import import_data_package
from .rows import PromptLine


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a draft that replaces the file at `path` at the end, as a whole. An error removes the draft."""
    draft = path.with_name(path.name + ".tmp")
    try:
        yield draft
        draft.replace(path)
    finally:
        # On a full disk, the draft must not take the space of what the next run uses.
        draft.unlink(missing_ok=True)


OUTPUT = "a parquet output"
BATCH_BYTES = 64 * 1024 * 1024
"""Bytes of lines that become columns together. They are a row group of the file."""


@contextmanager
def parquet_results(path: Path, rows_path: Path | None) -> Iterator["ResultsFile"]:
    """Open the results of an input, as `open_results` does. Their lines become the parquet file at the end.

    Raises:
        CommandFailed: pyarrow is missing, or the file at `path` is not one of results.
    """
    parquet = import_data_package("pyarrow.parquet", OUTPUT)
    lines = path.with_name(path.name + ".part.jsonl")
    if path.exists() and not lines.exists():
        _restore(parquet, path, lines)
    # Without the lock of the lines, another run may write them.
    with open_results(lines, rows_path) as results:
        is_complete = False
        try:
            yield results
            is_complete = True
        finally:
            has_errors = _convert(parquet, lines, path)
            if is_complete and not has_errors:
                lines.unlink()


def _convert(parquet: Any, lines: Path, path: Path) -> bool:
    """Write the lines as parquet. Return True if a line is an error."""
    has_errors = False
    schema = _schema()
    with replacing(path) as draft, parquet.ParquetWriter(draft, schema, compression="zstd") as writer:
        for batch in _batches(lines):
            has_errors = has_errors or any(line.get("error") is not None for line in batch)
            writer.write_table(import_data_package("pyarrow", OUTPUT).Table.from_pylist(batch, schema=schema))
    return has_errors


def _batches(lines: Path) -> Iterator[list[JsonObject]]:
    batch: list[JsonObject] = []
    num_bytes = 0
    with lines.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break  # a full disk has torn it
            batch.append(_to_columns(msgspec.json.decode(raw)))
            num_bytes += len(raw)
            if num_bytes >= BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
    if batch:
        yield batch


def _to_columns(line: JsonObject) -> JsonObject:
    """Return a line with the types of the columns: values of any type become JSON text, base64 becomes bytes."""
    for name in ("request_id", "prompt", "row"):
        if name in line and not isinstance(line[name], str):
            line[name] = msgspec.json.encode(line[name]).decode()
    for sample in (line, *line.get("siblings", ())):
        routed = sample.get("routed_experts")
        if routed is not None and routed.get("data") is not None:
            routed["data"] = base64.b64decode(routed["data"])
    return line


def _restore(parquet: Any, path: Path, lines: Path) -> None:
    """Write the results of a parquet file as lines, for another run."""
    try:
        with replacing(lines) as draft, parquet.ParquetFile(path) as file, draft.open("wb") as out:
            if not {"index", "fingerprint"} <= set(file.schema_arrow.names):
                raise ValueError("it has no fingerprints")
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    line = {name: value for name, value in row.items() if value is not None}
                    if "row" in line:
                        line["row"] = msgspec.Raw(line["row"].encode())
                    # `index` comes first, as in each line of results.
                    out.write(msgspec.json.encode(line) + b"\n")
    except ValueError as exc:
        raise WrongUsage(f"{path} is not a file of results ({exc}); choose another --output") from exc


def _schema() -> Any:
    pa = import_data_package("pyarrow", OUTPUT)
    string, int32, int64 = pa.string(), pa.int32(), pa.int64()
    ints, floats = pa.list_(int32), pa.list_(pa.float32())
    routed = {"start": int64, "shape": pa.list_(int64), "dtype": string, "data": pa.large_binary(), "key": string}
    sample = {
        "token_ids": ints,
        "text": string,
        "finish_reason": string,
        "stop_reason": int32,
        "weight_versions": ints,
        "attempts": int32,
        "worker_ids": pa.list_(string),
        "cached_tokens": int32,
        "logprobs": floats,
        "top_logprobs": pa.list_(floats),
        "prompt_logprobs": floats,
        "prompt_top_logprobs": pa.list_(floats),
        "top_token_ids": pa.list_(ints),
        "prompt_top_token_ids": pa.list_(ints),
        "lora_versions": ints,
        "sampling_mask": pa.list_(ints),
        "routed_experts": pa.struct(routed),
    }
    error = {"code": string, "message": string, "retryable": pa.bool_(), "field": string}
    return pa.schema(
        {"index": int64}
        | dict.fromkeys(("request_id", "fingerprint", "row", "model", "lora"), string)
        | dict(prompt_len=int32, prompt=string, prompt_token_ids=ints, **sample)
        | {"siblings": pa.list_(pa.struct(sample)), "error": pa.struct(error)}
    )


class RowsFile(AbstractContextManager["RowsFile"]):
    """Arrays by key, for one writer. After the exit, even by an error, `numpy.load` can read the arrays.

    Raises:
        CommandFailed: the file at `path` is not an `.npz`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = path.with_name(path.name + ".partial")
        self._saved = _read_names(path)
        self._folder.mkdir(exist_ok=True)
        self.num_bytes = 0
        """Bytes of the arrays that were added."""

    def __contains__(self, key: str) -> bool:
        """Return True if the array of `key` was added in this run or an earlier one."""
        return f"{key}.npy" in self._saved or (self._folder / f"{key}.npy").exists()

    def __exit__(self, *_error: object) -> None:
        """Move the arrays of the folder into the `.npz`."""
        added = sorted(self._folder.glob("*.npy"))
        if added:
            self._merge(added)
        shutil.rmtree(self._folder)

    def append(self, key: str, rows: Rows) -> None:
        """Add an array, u1 or <u2, of three dimensions. After the return, it survives a crash of this process."""
        self.num_bytes += rows.nbytes
        with replacing(self._folder / f"{key}.npy") as draft, draft.open("wb") as file:
            np.save(file, rows, allow_pickle=False)

    def _merge(self, added: Sequence[Path]) -> None:
        # A prompt whose line was lost was computed again. An archive must not have two members of the same name.
        kept = self._saved - {file.name for file in added}
        with replacing(self.path) as draft:
            with zipfile.ZipFile(draft, "w") as archive:
                if kept:
                    with zipfile.ZipFile(self.path) as saved:
                        for name in sorted(kept):
                            with saved.open(name) as old, archive.open(name, "w", force_zip64=True) as new:
                                shutil.copyfileobj(old, new)
                for file in added:
                    archive.write(file, file.name)
            with draft.open("rb") as written:
                os.fsync(written.fileno())


def _read_names(path: Path) -> frozenset[str]:
    if not path.exists():
        return frozenset()
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(archive.namelist())
    except zipfile.BadZipFile as exc:
        raise WrongUsage(f"{path} is not an .npz file ({exc}); choose another --output") from None


LINE_START = b'{"index":'
"""Start of every line. An incomplete last line is cut off only if it has this start, because another program may have
written the file."""


class _Rows(msgspec.Struct, frozen=True):
    key: str | None = None


class _Result(msgspec.Struct, frozen=True):
    routed_experts: _Rows | None = None


class _ResultLine(_Result, frozen=True, kw_only=True):
    """The fields of a line that a second run reads."""

    index: int
    fingerprint: str
    error: dict[str, object] | None = None
    model: str | None = None
    siblings: list[_Result] = []

    def keys(self) -> Iterator[str]:
        """Yield the keys of the line's arrays in the `.npz`."""
        for sample in (self, *self.siblings):
            if (rows := sample.routed_experts) is not None and rows.key is not None:
                yield rows.key


_line_decoder = msgspec.json.Decoder(_ResultLine)


class ResultsFile:
    """Results of one input, for one writer at a time. `open_results` creates it."""

    def __init__(
        self, file: IO[bytes], rows: RowsFile | None, finished: Mapping[int, str], models: Collection[str]
    ) -> None:
        self.rows = rows
        """File for routed experts. None: the lines contain the routed experts."""
        self.finished = finished
        """Fingerprints of the prompts that had results when the file was opened, by index."""
        self.model = next(iter(models)) if len(models) == 1 else None
        """Model that generated all of these results. None if there are none, or if there are several models."""
        self._file = file
        self._num_lines = self._num_bytes = 0

    @property
    def mean_bytes(self) -> int:
        """Mean size of the results of this run, with their routed experts; 0 without any."""
        added = 0 if self.rows is None else self.rows.num_bytes
        return (self._num_bytes + added) // max(self._num_lines, 1)

    def append(self, line: Mapping[str, object]) -> None:
        """Append a line. After the return, the line survives a crash of this process."""
        # Rows of data sets have values of other types, such as dates.
        raw = msgspec.json.encode(line, enc_hook=str) + b"\n"
        self._num_lines += 1
        self._num_bytes += len(raw)
        self._file.write(raw)
        self._file.flush()


@contextmanager
def open_results(path: Path, rows_path: Path | None) -> Iterator[ResultsFile]:
    """Open the results of an input, new or left by earlier runs.

    Args:
        path: the JSONL file. It is created if it is missing.
        rows_path: the `.npz` for routed experts. None: the lines contain the routed experts.

    Raises:
        CommandFailed: another process writes to the file, or the file has lines that are not results.
    """
    with ExitStack() as stack:
        file = stack.enter_context(_open_locked(path))
        rows = None if rows_path is None else stack.enter_context(RowsFile(rows_path))
        finished, dropped, models = _scan(file, path, rows)
        if dropped:
            file = stack.enter_context(_without(file, path, dropped))
        yield ResultsFile(file, rows, finished, models)
        os.fsync(file.fileno())


def _scan(file: IO[bytes], path: Path, rows: RowsFile | None) -> tuple[dict[int, str], set[int], set[str]]:
    """Return the finished prompts, the numbers of the lines to remove, and the models of the finished prompts.

    Cut off an incomplete last line.
    """
    finished: dict[int, str] = {}
    models: set[str] = set()
    dropped: set[int] = set()
    torn = b""
    end = file.seek(0)
    for number, raw in enumerate(file):
        if not raw.endswith(b"\n") and raw[: len(LINE_START)] == LINE_START[: len(raw)]:
            torn = raw
            break
        end += len(raw)
        try:
            line = _line_decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise WrongUsage(f"{path} line {number + 1} is not a result ({exc}); choose another --output") from None
        keys = list(line.keys())
        if keys and rows is None:
            raise WrongUsage(f"the results in {path} need --routed-experts npz, as in the first run")
        if line.error is not None or not all(key in rows for key in keys if rows is not None):
            dropped.add(number)
        else:
            finished[line.index] = line.fingerprint
            if line.model is not None:
                models.add(line.model)
    if torn:
        file.truncate(end)
    return finished, dropped, models


def _without(file: IO[bytes], path: Path, dropped: set[int]) -> IO[bytes]:
    """Replace the file by a copy without the lines `dropped`. Return the new file, which is locked too."""
    draft_path = path.with_name(path.name + ".tmp")
    draft_path.unlink(missing_ok=True)
    draft = _open_locked(draft_path)
    file.seek(0)
    draft.writelines(raw for number, raw in enumerate(file) if number not in dropped)
    draft.flush()
    os.fsync(draft.fileno())
    draft_path.replace(path)
    return draft


def _open_locked(path: Path) -> IO[bytes]:
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CommandFailed(f"another process is writing to {path}") from None
    return file


def result_line(
    prompt: PromptLine,
    generation: Generation,
    tokenizer: Tokenizer | None,
    rows: RowsFile | None,
    *,
    with_prompt: bool = False,
) -> dict[str, object]:
    """Return the line of a prompt that succeeded. With n > 1, the first sample has the others under `siblings`.

    Args:
        rows: file to which routed experts are added. None: the line contains them as base64.
        with_prompt: add the prompt and its token ids.
    """
    line: dict[str, object] = {
        **_start_line(prompt),
        "model": generation.model,
        "lora": generation.lora,
        "prompt_len": generation.prompt_len,
        **_sample(prompt, generation, tokenizer, rows),
    }
    if with_prompt:
        if prompt.prompt is not None:
            line["prompt"] = prompt.prompt
        line["prompt_token_ids"] = np.asarray(generation.request.prompt_token_ids).tolist()
    if generation.siblings:
        line["siblings"] = [_sample(prompt, sibling, tokenizer, rows) for sibling in generation.siblings]
    return line


def error_line(prompt: PromptLine, error: RequestError) -> dict[str, object]:
    """Return the line of a prompt that failed. The next run sends the prompt again."""
    described: dict[str, object] = {"code": error.code, "message": error.message, "retryable": error.retryable}
    if isinstance(error, InvalidRequest):
        described["field"] = error.field
    return {**_start_line(prompt), "error": described}


def _start_line(prompt: PromptLine) -> dict[str, object]:
    line = {"index": prompt.index, "request_id": prompt.request_id, "fingerprint": prompt.fingerprint}
    return line if prompt.row is None else {**line, "row": prompt.row}


def first_error(generation: Generation) -> RequestError | None:
    """Return the error of the first sample of a request that failed, or None if no sample failed."""
    return next((sample.error for sample in (generation, *generation.siblings) if sample.error is not None), None)


def _sample(
    prompt: PromptLine, generation: Generation, tokenizer: Tokenizer | None, rows: RowsFile | None
) -> dict[str, object]:
    sample: dict[str, object] = {"token_ids": generation.token_ids.tolist()}
    if tokenizer is not None:
        sample["text"] = tokenizer.decode(generation.token_ids.tolist())
    sample |= {
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "weight_versions": generation.weight_versions.tolist(),
        "attempts": generation.attempts,
        "worker_ids": generation.worker_ids,
        "cached_tokens": generation.cached_tokens,
    }
    floats = ("logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs")
    for name in (*floats, "top_token_ids", "prompt_top_token_ids", "lora_versions"):
        values = getattr(generation, name)
        if values is not None:
            sample[name] = _json_logprobs(values) if name in floats else values.tolist()
    if generation.sampling_mask is not None:
        sample["sampling_mask"] = [ids.tolist() for ids in generation.sampling_mask.split()]
    sample["routed_experts"] = _encode_experts(prompt, generation, rows)
    return sample


def _encode_experts(prompt: PromptLine, generation: Generation, rows: RowsFile | None) -> dict[str, object] | None:
    if generation.routed_experts is None:
        return None
    array = np.ascontiguousarray(generation.routed_experts)
    described: dict[str, object] = {"start": generation.start, "shape": array.shape, "dtype": dtype_of(array)}
    if rows is None:
        return {**described, "data": base64.b64encode(array.reshape(-1).view(np.uint8).data).decode()}
    key = f"{prompt.index}.{generation.child}" if generation.child else str(prompt.index)
    rows.append(key, array)
    return {**described, "key": key}


def _json_logprobs(values: Float32s) -> object:
    """Return log probabilities as (nested) lists. Nine digits identify a float32."""
    if values.ndim > 1:
        return [_json_logprobs(row) for row in values]
    return [float(f"{value:.9g}") for value in json_logprobs(values)]
