"""A client in a separate process that faults may kill or stop: `python -m tests.soak.client URL NAME FOLDER SEED ...`.

It keeps requests of all kinds in flight, compares each result with an undisturbed engine, and writes the number of its
results to a file every second. SIGTERM ends it after its requests.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

import rollbus
from tests.chaos.publisher import FLEET
from tests.elastic.load import Load
from tests.elastic.run import ENGINE, GRACE_S

COUNT_S = 1.0
COUNTS = "counts"
"""Directory of the files with the numbers of results, one for each process."""


class Folders(dict[int, Path]):
    """The checkpoint of each version, also of later ones, as `Checkpoints` names them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, version: int) -> Path:
        """Return the folder of a version."""
        return self._folder / f"version-{version}"


async def send(url: str, name: str, folder: str, seed: str, in_flight: str, credentials: str) -> None:
    """Send requests until SIGTERM."""
    counts = Path(folder) / COUNTS / f"{name}-{os.getpid()}"
    async with rollbus.connect(
        url, fleet=FLEET, client=name, credentials=credentials, wait_for_workers_s=GRACE_S
    ) as rb:
        load = Load(rb, int(seed), ENGINE, Folders(Path(folder)))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, load.end)
        async with asyncio.TaskGroup() as tasks:
            senders = load.begin(tasks, int(in_flight))
            while not all(sender.done() for sender in senders):
                await asyncio.sleep(COUNT_S)
                found = {"results": load.results, "attempts": load.attempts, "tokens": load.num_tokens}
                partial = counts.with_suffix(".partial")
                partial.write_bytes(msgspec.json.encode(found))
                partial.replace(counts)


def main() -> int:
    """Run one client."""
    uvloop.run(send(*sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
