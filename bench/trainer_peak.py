"""Measures the peak memory of one way of `bench.trainer_ways` in a process that `bench.trainer` starts.

    python -m bench.trainer_peak WAY FILE PROMPT_TOKENS

The program prints the maximum growth of the process in bytes, from Linux's `VmHWM`. This includes the memory of numpy
and torch, and the finished tensors. It reads messages from the file one by one when the way asks for them, as from a
socket. So a frame counts while it is in use, and an HTTP body counts as a whole.
"""

import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.memory import give_back, peak_bytes, reset_peak, resident_bytes
from bench.trainer_ways import WAYS, make_prompt, make_rollout

_SIZE = struct.Struct("<Q")
WARM_UP_TOKENS = 64


def write_messages(path: Path, messages: Iterable[bytes]) -> None:
    """Store messages for `read_messages`."""
    with path.open("wb") as file:
        for message in messages:
            file.write(_SIZE.pack(len(message)))
            file.write(message)


def read_messages(path: Path) -> Iterator[bytes]:
    """Yield the messages of a file one at a time, without storing them."""
    with path.open("rb", buffering=0) as file:
        while size := file.read(_SIZE.size):
            yield file.read(_SIZE.unpack(size)[0])


def grown_bytes(name: str, path: Path, num_prompt: int) -> int:
    """Return the maximum growth of this process while it reads a file's messages."""
    way, prompt = WAYS[name], make_prompt(num_prompt)
    small = make_rollout(WARM_UP_TOKENS, WARM_UP_TOKENS // 2)
    # Do not count memory that the first request allocates once.
    way.read(small.prompt, way.write(small))
    give_back()
    reset_peak()
    before = resident_bytes()
    way.read(prompt, read_messages(path))
    return peak_bytes() - before


if __name__ == "__main__":
    sys.stdout.write(f"{grown_bytes(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))}\n")
