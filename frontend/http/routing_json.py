"""Routed experts as JSON in pieces, because those of a long answer have many megabytes."""

from binascii import b2a_base64
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Final, Literal

import msgspec
import numpy as np

from ...schemas.rows import RowDtype, Rows, dtype_of

__all__ = ["RowsFormat", "RowsJson", "routed_experts_json", "rows_json"]

RowsFormat = Literal["object", "npy"]
"""Formats of routed experts in a choice: an object, or vLLM's string."""
RowsJson = Callable[[Rows, int], Iterator[bytes]]
"""Yields the JSON of rows from an absolute position."""

ENCODED_BYTES = 3 * 64 * 1024
"""Bytes that are encoded at a time: a multiple of three, so that base64 needs padding only at the end."""
DTYPE_NAMES: Final[dict[RowDtype, str]] = {"u1": "uint8", "<u2": "uint16"}
"""numpy's names of the dtypes, without the byte order, which is always little-endian."""


def routed_experts_json(rows: Rows, start: int) -> Iterator[bytes]:
    """Yield `{"data": base64, "shape": [rows, layers, top_k], "start": n, "dtype": name}` in pieces, without blanks.

    `data` is the first field, because clients cut it out of the answer's bytes without parsing the JSON.

    Args:
        rows: u1|<u2[num_rows, num_layers, top_k].
        start: absolute position of row 0.
    """
    yield b'{"data":"'
    data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    for at in range(0, len(data), ENCODED_BYTES):
        yield b2a_base64(data[at : at + ENCODED_BYTES], newline=False)
    rest = {"shape": rows.shape, "start": start, "dtype": DTYPE_NAMES[dtype_of(rows)]}
    yield b'",' + msgspec.json.encode(rest)[1:]


def rows_json(wanted: RowsFormat | None, *, npy: bool) -> RowsJson:
    """Return the format that a request asks for.

    Args:
        wanted: the format in the request; None: that of the service.
        npy: True if the format of the service is vLLM's.
    """
    return _npy_json if wanted == "npy" or (wanted is None and npy) else routed_experts_json


def _npy_json(rows: Rows, _start: int) -> Iterator[bytes]:
    """Yield the rows as vLLM's server returns them: a string with the base64 of a `.npy` file."""
    header = BytesIO()
    array = np.ascontiguousarray(rows)
    described = np.lib.format.header_data_from_array_1_0(array)  # type: ignore[no-untyped-call]
    np.lib.format.write_array_header_1_0(header, described)  # type: ignore[no-untyped-call]
    data = array.reshape(-1).view(np.uint8).data
    first = ENCODED_BYTES - len(header.getvalue())
    yield b'"'
    yield b2a_base64(header.getvalue() + data[:first], newline=False)
    for at in range(first, len(data), ENCODED_BYTES):
        yield b2a_base64(data[at : at + ENCODED_BYTES], newline=False)
    yield b'"'
