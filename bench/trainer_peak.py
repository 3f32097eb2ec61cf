"""Peak memory of one way of `bench.trainer_ways`, measured in a process of its own, which `bench.trainer` starts.

    python -m bench.trainer_peak WAY FILE PROMPT_TOKENS

Prints the bytes by which the process grew at most, by Linux's `VmHWM`: numpy's and torch's memory counts, and so do
the finished tensors. Messages are read from the file one by one as the way asks for them, as they would come from a
socket: a frame counts while it is in use, and an HTTP body as a whole.
"""

import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.memory import give_back, peak_bytes, reset_peak, resident_bytes
from bench.trainer_ways import WAYS, make_prompt, make_rollout

__all__ = ["grown_bytes", "read_messages", "write_messages"]

_SIZE = struct.Struct("<Q")
WARM_UP_TOKENS = 64


def write_messages(path: Path, messages: Iterable[bytes]) -> None:
    """Store messages for `read_messages`."""
    with path.open("wb") as file:
        for message in messages:
            file.write(_SIZE.pack(len(message)))
            file.write(message)


def read_messages(path: Path) -> Iterator[bytes]:
    """The messages of a file, one at a time and kept nowhere."""
    with path.open("rb", buffering=0) as file:
        while size := file.read(_SIZE.size):
            yield file.read(_SIZE.unpack(size)[0])


def grown_bytes(name: str, path: Path, num_prompt: int) -> int:
    """By how much this process grows at most while it reads a file's messages."""
    way, prompt = WAYS[name], make_prompt(num_prompt)
    small = make_rollout(WARM_UP_TOKENS, WARM_UP_TOKENS // 2)
    # What is set up once does not belong to the request.
    way.read(small.prompt, way.write(small))
    give_back()
    reset_peak()
    before = resident_bytes()
    way.read(prompt, read_messages(path))
    return peak_bytes() - before


if __name__ == "__main__":
    sys.stdout.write(f"{grown_bytes(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))}\n")
