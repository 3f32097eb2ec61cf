"""Write the golden files of the current wire version: `python -m tests.golden.generate`.

`v1/<name>.msgpack` (or `.json`, for messages that are JSON on the wire) has the bytes of `vectors.VECTORS`, and
`v1/<name>.view.json` has the same message in readable form. `tests.golden.capture` has recorded
`v1/captured/<name>.msgpack` from a real engine; this module writes only its view. This module does not write
`v1/earlier/<name>.<number>.*` either: earlier releases wrote these bytes for the same message, before a field was
appended.
"""

from pathlib import Path

import msgspec

from rollbus.schemas.messages import (
    Frame,
    LinkMessage,
    RequestMessage,
    decode_frame,
    decode_request_message,
    encode,
    encode_json,
)
from tests.golden.vectors import VECTORS
from tests.golden.view import as_json

ROOT = Path(__file__).parent / "v1"


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a real engine and all frames that answered it, as they were on the wire."""

    about: str
    """Readable name of model and engine."""
    request: bytes
    """An encoded `RequestMessage`."""
    frames: list[bytes]
    """Encoded frames in the order of their arrival."""

    def decoded(self) -> tuple[RequestMessage, list[Frame]]:
        """Return the decoded request and frames."""
        return decode_request_message(self.request), [decode_frame(frame) for frame in self.frames]


def captured_runs() -> dict[str, Captured]:
    """Return the captured runs by the names of their files."""
    decoder = msgspec.msgpack.Decoder(Captured)
    return {path.stem: decoder.decode(path.read_bytes()) for path in sorted((ROOT / "captured").glob("*.msgpack"))}


def generate(root: Path) -> None:
    """Write all computed golden files and views below `root`."""
    (root / "captured").mkdir(parents=True, exist_ok=True)
    for name, message in VECTORS.items():
        if isinstance(message, RequestMessage | Frame | LinkMessage):
            (root / f"{name}.msgpack").write_bytes(encode(message))
            (root / f"{name}.view.json").write_bytes(as_json(message))
        else:
            (root / f"{name}.json").write_bytes(encode_json(message) + b"\n")
    for name, run in captured_runs().items():
        request, frames = run.decoded()
        view = as_json({"about": run.about, "request": request, "frames": frames})
        (root / "captured" / f"{name}.view.json").write_bytes(view)


if __name__ == "__main__":
    generate(ROOT)
