"""Writes the results of `rollbus generate` as parquet.

A parquet file is readable only after its end is written. So during the run the results are lines of JSON in a file
beside it (`NAME.parquet.part.jsonl`). At the end, even after an error, all lines become a new `.parquet`, which
replaces the old one as a whole. The lines are removed after a run in which each prompt has its result.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from .exits import CommandFailed, ExitCode
from .inputs import import_data_package

__all__ = ["parquet_results"]

BATCH_BYTES = 64 * 1024 * 1024
"""Bytes of lines that become columns together. They are a row group of the file."""


@contextmanager
def parquet_results(path: Path) -> Iterator[Path]:
    """Yield the path of the file of lines that becomes the parquet file at the end.

    Raises:
        CommandFailed: pyarrow is missing, or the file at `path` is not one of results.
    """
    parquet = import_data_package("pyarrow.parquet", "a parquet output")
    lines = path.with_name(path.name + ".part.jsonl")
    if path.exists() and not lines.exists():
        _restore(parquet, path, lines)
    is_complete = False
    try:
        yield lines
        is_complete = True
    finally:
        if lines.exists():
            has_errors = _convert(parquet, lines, path)
            if is_complete and not has_errors:
                lines.unlink()


def _convert(parquet: Any, lines: Path, path: Path) -> bool:
    """Write the lines as parquet. Return True if a line is an error."""
    has_errors = False
    schema = _schema()
    draft = path.with_name(path.name + ".tmp")
    with parquet.ParquetWriter(draft, schema, compression="zstd") as writer:
        for batch in _batches(lines):
            has_errors = has_errors or any(line.get("error") is not None for line in batch)
            writer.write_table(_table(batch, schema))
    draft.replace(path)
    return has_errors


def _batches(lines: Path) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    num_bytes = 0
    with lines.open("rb") as file:
        for raw in file:
            batch.append(_to_columns(msgspec.json.decode(raw)))
            num_bytes += len(raw)
            if num_bytes >= BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
    if batch:
        yield batch


def _table(batch: list[dict[str, Any]], schema: Any) -> Any:
    return import_data_package("pyarrow", "a parquet output").Table.from_pylist(batch, schema=schema)


def _to_columns(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with the types of the columns: values of any type become JSON text, base64 becomes bytes."""
    for name in ("request_id", "prompt", "row"):
        if name in line and not isinstance(line[name], str):
            line[name] = msgspec.json.encode(line[name]).decode()
    for sample in (line, *line.get("siblings", ())):
        routed = sample.get("routed_experts")
        if routed is not None and "data" in routed:
            routed["data"] = base64.b64decode(routed["data"])
    return line


def _restore(parquet: Any, path: Path, lines: Path) -> None:
    """Write the results of a parquet file as lines, for another run."""
    draft = lines.with_name(lines.name + ".tmp")
    try:
        with parquet.ParquetFile(path) as file, draft.open("wb") as out:
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
        draft.unlink(missing_ok=True)
        raise CommandFailed(
            f"{path} is not a file of results ({exc}); choose another --output", ExitCode.USAGE
        ) from exc
    draft.replace(lines)


def _schema() -> Any:
    pa = import_data_package("pyarrow", "a parquet output")
    ints, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    routed = [("start", pa.int64()), ("shape", pa.list_(pa.int64())), ("dtype", pa.string())]
    sample = [
        ("token_ids", ints),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.int32()),
        ("weight_versions", ints),
        ("attempts", pa.int32()),
        ("worker_ids", pa.list_(pa.string())),
        ("cached_tokens", pa.int32()),
        ("logprobs", floats),
        ("top_logprobs", pa.list_(floats)),
        ("prompt_logprobs", floats),
        ("prompt_top_logprobs", pa.list_(floats)),
        ("top_token_ids", pa.list_(ints)),
        ("prompt_top_token_ids", pa.list_(ints)),
        ("lora_versions", ints),
        ("sampling_mask", pa.list_(ints)),
        ("routed_experts", pa.struct([*routed, ("data", pa.large_binary()), ("key", pa.string())])),
    ]
    error = [("code", pa.string()), ("message", pa.string()), ("retryable", pa.bool_()), ("field", pa.string())]
    names = [(name, pa.string()) for name in ("request_id", "fingerprint", "row", "model", "lora")]
    return pa.schema(
        [
            ("index", pa.int64()),
            *names,
            ("prompt_len", pa.int32()),
            ("prompt", pa.string()),
            ("prompt_token_ids", ints),
            *sample,
            ("siblings", pa.list_(pa.struct(sample))),
            ("error", pa.struct(error)),
        ]
    )
