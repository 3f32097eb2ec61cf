"""The rows of an input of `rollbus generate`: a JSONL file or stream, a parquet file, or a data set of Hugging Face."""

import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final

from ....schemas.decoding import nearest
from ....schemas.errors import ForeignError, foreign_code
from ....schemas.options import HUB_ID, pip_install
from ..exits import CommandFailed, WrongUsage

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of a line. The longest allowed prompt fits as decimal numbers. A file without line ends must not fill
memory."""
NUM_CHECKED: Final = 1000
"""Rows of a stream that are checked before the first request. They wait in memory."""
ROWS_PER_BATCH: Final = 256
"""Rows of parquet that become Python objects together."""
PARQUET_MAGIC: Final = b"PAR1"
FILE_SUFFIXES: Final = (".csv", ".gz", ".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".zst")
"""Endings of names that are files. The Hub has data sets with other names."""

Row = bytes | dict[str, object]
"""A line of JSON, or the columns of a row."""
NumberedRow = tuple[int, Row]
"""A row and its position, counted from 0. Blank lines count but are no rows."""


@dataclass(slots=True)
class Input:
    """Numbered rows, which can be read several times."""

    name: str
    unit: str
    """The word for a row: line or row."""
    read: Callable[[], Iterator[NumberedRow]]
    """Returns the rows from the first one. A stream returns each row only once."""
    is_stream: bool = False
    """True if the rows cannot be read twice, or are too many for that."""
    revision: str | None = None
    """Commit of a data set on the Hub."""
    _head: list[NumberedRow] = field(default_factory=list)
    _rest: Iterator[NumberedRow] | None = None

    def rows_to_check(self) -> Iterator[NumberedRow]:
        """Yield the rows to check before the first request: all, or the first 1,000 of a stream."""
        if not self.is_stream:
            return self.read()
        if self._rest is None:
            self._rest = self.read()
            self._head = list(islice(self._rest, NUM_CHECKED))
        return iter(self._head)

    def check_not_empty(self) -> None:
        """Check that there is a row.

        Raises:
            CommandFailed: there is none.
        """
        if next(self.rows_to_check(), None) is None:
            raise WrongUsage(f"--input {self.name} has no rows; expected one for each prompt")

    def rows(self) -> Iterator[NumberedRow]:
        """Yield all rows."""
        return self.read() if self._rest is None else chain(self._head, self._rest)

    def place(self, index: int) -> str:
        """Return the name of a row for messages, counted from 1."""
        return f"{self.name} {self.unit} {index + 1}"


def open_input(
    name: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    streams: bool = False,
) -> Input:
    """Return the input of this name: `-` for stdin, a file, a directory of a data set, or a data set on the Hub.

    Args:
        subset: name of a subset of a data set; None: its only one or its default.
        split: name of a split of a data set; None: its only one.
        revision: commit of a data set on the Hub; None: the newest.
        streams: read a data set row by row from its source, without a copy on this machine.

    Raises:
        CommandFailed: there is no such input, it cannot be read, or a package is missing.
    """
    path = Path(name)
    kind = path.stat().st_mode if name != "-" and path.exists() else None
    is_set = kind is None or stat.S_ISDIR(kind)
    if name == "-":
        return Input("stdin", "line", lambda: _lines(sys.stdin.buffer, "stdin"), is_stream=True)
    if not is_set:
        given = [text for text, value in (("--subset", subset), ("--split", split), ("--stream", streams)) if value]
        if given:
            raise WrongUsage(f"{given[0]} has no effect on a file")
        if kind is not None and stat.S_ISFIFO(kind):
            return Input(name, "line", lambda: _lines_of(path), is_stream=True)
        with path.open("rb") as file:
            is_parquet = path.suffix == ".parquet" or file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
        if is_parquet:
            import_data_package("pyarrow.parquet", "a parquet file")
            return Input(name, "row", lambda: _parquet_rows(path))
        return Input(name, "line", lambda: _lines_of(path))
    is_hub_name = HUB_ID.fullmatch(name) and not name.endswith(FILE_SUFFIXES) and not path.parent.is_dir()
    if kind is None and not is_hub_name:
        advice = _similar_file(path) or "; a data set on the Hub is OWNER/NAME"
        raise WrongUsage(f"--input {name} does not exist{advice}")
    return _data_set(name, None if kind is None else path, subset, split, revision, streams=streams)


def import_data_package(name: str, what: str) -> Any:
    """Import `pyarrow.parquet`, `datasets` or another package of the extra `data`.

    Raises:
        CommandFailed: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise WrongUsage(f"{what} needs the package {name.partition('.')[0]}: {pip_install('data')}") from None


def _similar_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"; {path.parent} is not a directory"
    return nearest(path.name, names)


def _lines_of(path: Path) -> Iterator[NumberedRow]:
    with path.open("rb") as file:
        yield from _lines(file, str(path))


def _lines(file: IO[bytes], name: str) -> Iterator[NumberedRow]:
    for index, raw in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b"")):
        if len(raw) > MAX_LINE_BYTES:
            raise WrongUsage(f"{name} line {index + 1} is longer than {MAX_LINE_BYTES} bytes")
        if not raw.isspace():
            yield index, raw


def _parquet_rows(path: Path) -> Iterator[NumberedRow]:
    parquet = import_data_package("pyarrow.parquet", "a parquet file")
    problem = "is not a parquet file"
    try:
        with foreign_code(CommandFailed), parquet.ParquetFile(path) as file:
            problem = "cannot be read"
            batches = file.iter_batches(batch_size=ROWS_PER_BATCH)
            yield from _rows_of(batches)
    except ForeignError as exc:
        raise WrongUsage(f"{path} {problem}: {exc}") from exc.cause


def _rows_of(batches: Iterable[Any]) -> Iterator[NumberedRow]:
    return enumerate(row for batch in batches for row in batch.to_pylist())


def _data_set(
    name: str, folder: Path | None, subset: str | None, split: str | None, revision: str | None, *, streams: bool
) -> Input:
    datasets = import_data_package("datasets", "a data set")
    # The name of a data set comes from the last part of the path, which `.` does not have.
    where = name if folder is None else str(folder.resolve())
    try:
        with foreign_code(CommandFailed):
            if folder is not None and any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
                loaded = datasets.load_from_disk(name)
                if isinstance(loaded, dict):
                    loaded = loaded[_one_split(name, list(loaded), split)]
            else:
                if folder is None and revision is None:
                    revision = _newest_commit(name)
                places = {"revision": revision} if folder is None else {}
                if split is None:
                    split = _one_split(name, datasets.get_dataset_split_names(where, subset, **places), split)
                loaded = datasets.load_dataset(where, subset, split=split, streaming=streams, **places)
            in_arrow = loaded.with_format("arrow")
    except ForeignError as exc:
        what = "is not a data set" if folder is not None else "is not a file, and not a data set on the Hub"
        raise WrongUsage(
            f"--input {name} {what} that can be read ({exc}); --subset and --split choose a part of a data set"
        ) from exc.cause
    return Input(
        name, "row", lambda: _rows_of(in_arrow.iter(batch_size=ROWS_PER_BATCH)), is_stream=streams, revision=revision
    )


def _one_split(name: str, splits: Sequence[str], split: str | None) -> str:
    if split in splits:
        return str(split)
    if split is None and len(splits) == 1:
        return splits[0]
    problem = "several splits" if split is None else f"no split {split}"
    raise WrongUsage(f"--input {name} has {problem}; choose one with --split: {', '.join(splits)}")


def _newest_commit(name: str) -> str | None:
    """Return the commit of a data set on the Hub, or None if only the cache of this machine has the data set."""
    hub = import_data_package("huggingface_hub", "a data set on the Hub")
    try:
        # The Hub has answered: the data set does not exist, or needs a token.
        with foreign_code(hub.errors.HfHubHTTPError):
            return str(hub.HfApi().dataset_info(name).sha)
    except ForeignError:
        return None
