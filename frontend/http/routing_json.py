"""Routed experts as JSON, and answers that are sent in pieces, so that large ones are never in memory as a whole."""

import asyncio
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from schemas.rows import RowDtype, Rows, dtype_of

__all__ = ["JsonPieces", "routed_experts_json"]

ENCODED_BYTES = 3 * 64 * 1024
"""Encoded at a time: a multiple of three, so that base64 needs no padding before the end."""
SEND_BYTES = 64 * 1024
"""Smaller pieces are put together: each send is a system call."""
DTYPE_NAMES: Final[dict[RowDtype, str]] = {"u1": "uint8", "<u2": "uint16"}
"""numpy's names of the dtypes, without the byte order, which is always little-endian."""


def routed_experts_json(rows: Rows, start: int) -> Iterator[bytes]:
    """`{"data": base64, "shape": [rows, layers, top_k], "start": n, "dtype": name}` in pieces, without blanks.

    `data` comes first: clients cut it out of the answer's bytes without parsing them.

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


class JsonPieces(Response):
    """A JSON answer that is made while it is sent, no faster than the client reads it.

    Args:
        pieces: of the document; making them must not fail, as the status has been sent by then.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterable[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gathered = bytearray()
        for piece in self._pieces:
            gathered += piece
            if len(gathered) >= SEND_BYTES:
                await send({"type": "http.response.body", "body": bytes(gathered), "more_body": True})
                gathered.clear()
                # Others' turn, also when this client reads as fast as it is sent to.
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": bytes(gathered)})
