"""Routed experts as JSON in pieces, because those of a long answer have many megabytes."""

from binascii import b2a_base64
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from ...schemas.rows import RowDtype, Rows, dtype_of

__all__ = ["routed_experts_json"]

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
