"""Own an engine until killed: `python -m tests.engine.owner MODEL` prints the ids of the engine's processes."""

import asyncio
import json
import sys

import psutil

from rollbus.workers.engines.vllm.engine import VllmEngine


async def own(model: str) -> None:
    """Start an engine, print the ids of its processes, and wait to be killed."""
    engine = VllmEngine(model)
    await engine.start()
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    sys.stdout.write(json.dumps(children) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1]))
