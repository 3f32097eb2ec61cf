"""A trainer without asyncio in its own process: `python -m tests.bus.sync_program NAME URL FLEET`.

NAME selects one of the functions. The program prints one line of JSON when the function is done, then exits normally.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil

import rollbus
from tests.support.processes import becomes_true
from tests.support.requests import endless, greedy, short

LEFT_OPEN: list[Iterator[rollbus.Chunk]] = []
"""Streams that exist until the interpreter exits."""


def leave_open(url: str, fleet: str) -> None:
    """Exit with an unclosed client and an unfinished stream."""
    rb = rollbus.sync.connect(url, fleet=fleet, client="program").__enter__()
    rb.fleet.wait_for_workers()
    LEFT_OPEN.append(rb.generate(endless()))
    say(next(LEFT_OPEN[0]).num_tokens)


def be_interrupted(url: str, fleet: str) -> None:
    """Interrupt each kind of call with SIGINT, then complete requests with the same ids."""
    with rollbus.sync.connect(url, fleet=fleet) as rb:
        rb.fleet.wait_for_workers()
        groups = rb.groups([endless()], n=1, need=1).__enter__()
        calls: dict[str, Callable[[], object]] = {
            "complete": lambda: rb.complete(endless("complete")),
            "complete_many": lambda: list(rb.complete_many([endless("complete_many")])),
            "generate": lambda: [None for _ in rb.generate(endless("generate"))],
            "groups": groups.step,
            "stream_many": lambda: list(rb.stream_many([endless("stream_many")])),
            "wait_for_workers": lambda: rb.fleet.wait_for_workers(1000),
        }
        interrupted = [name for name, call in calls.items() if is_interrupted(rb, call)]
        # The group of the step runs until the context of the groups ends.
        groups.__exit__(None, None, None)
        answers = [rb.complete(short(name)).finish_reason for name in calls]
    say([interrupted, answers])


def is_interrupted(rb: rollbus.sync.BlockingClient, call: Callable[[], object]) -> bool:
    """Send SIGINT while `call` blocks; return True if `call` raised `KeyboardInterrupt`."""

    def interrupt() -> None:
        if becomes_true(lambda: bool(rb._connected.num_calls)):
            os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        interrupting.join()
    return False


def fork(url: str, fleet: str) -> None:
    """Fork during requests; the child tries all forbidden calls, uses its own client and exits."""
    with rollbus.sync.connect(url, fleet=fleet) as rb:
        rb.fleet.wait_for_workers()
        requests = [greedy(index, 20, request_id=f"r{index}") for index in range(60)]
        stream, many = rb.generate(greedy(1, 200)), rb.complete_many(requests, max_in_flight=8)
        chunks, results = [next(stream)], [next(many)]
        held, groups = rb.fleet, rb.groups([short("group")], n=1, need=1).__enter__()
        child = os.fork()
        if child == 0:
            errors = [error_of(call) for call in (
                lambda: rb.complete(short("child")), lambda: rb.fleet, rb.stats, held.state, lambda: next(stream),
                lambda: next(many), lambda: list(rb.complete_many([short("child")])), groups.step,
                lambda: rb.groups([], n=1, need=1),
            )]  # fmt: skip
            groups.__exit__(None, None, None)
            say({"errors": errors, "connections": len(psutil.Process().net_connections()), "own": own(url, fleet)})
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        chunks += stream
        results += many
        results += [answer for group in groups.step().groups for answer in group.generations]
        groups.__exit__(None, None, None)
        tokens = sum(chunk.num_tokens for chunk in chunks), [len(result.token_ids) for result in results]
        say({"code": os.waitstatus_to_exitcode(status), "tokens": tokens, "missing": rb.stats().missing_frames})


def fork_with_asyncio(url: str, fleet: str) -> None:
    """Fork during requests of an asyncio client; the child closes the client and exits like a multiprocessing child.

    The child must not close its inherited event loop, because the loop shares its selector with the parent's loop.
    """

    async def main() -> None:
        async with rollbus.connect(url, fleet=fleet) as rb:
            await rb.fleet.wait_for_workers()
            stream = rb.generate(greedy(1, 200))
            chunks = [await anext(stream)]
            held = rb.fleet
            child = os.fork()
            if child == 0:
                errors = []
                for call in (lambda: rb.complete(short("child")), held.state, lambda: drain(stream)):
                    try:
                        await call()
                    except rollbus.RollbusError as exc:
                        errors.append(type(exc).__name__)
                await rb.__aexit__(None, None, None)
                say({"errors": errors, "connections": len(psutil.Process().net_connections())})
                os._exit(7)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            chunks += [chunk async for chunk in stream]
            after = await rb.complete(short("after"))
            tokens = sum(chunk.num_tokens for chunk in chunks), len(after.token_ids)
            say({"code": os.waitstatus_to_exitcode(status), "tokens": tokens, "missing": rb.stats().missing_frames})

    asyncio.run(main())


async def drain(stream: Any) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


class Prompts:
    """A dataset that tries to use the parent's client in the processes of the data loader."""

    def __init__(self, rb: rollbus.sync.BlockingClient) -> None:
        self._rb = rb

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, str, int]:
        return index, error_of(lambda: self._rb.complete(short(f"child-{index}"))), os.getpid()


def load_data(url: str, fleet: str) -> None:
    """Complete requests from a torch DataLoader with two processes, while the loader produces more."""
    from torch.utils.data import DataLoader

    errors, pids = set(), set()
    with rollbus.sync.connect(url, fleet=fleet) as rb:
        rb.fleet.wait_for_workers()

        def requests() -> Iterator[rollbus.GenerateRequest]:
            loader: Any = DataLoader(Prompts(rb), batch_size=4, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
            for indices, names, processes in loader:
                errors.update(names)
                pids.update(processes.tolist())
                for index in indices.tolist():
                    yield short(f"r{index}")

        results = [result.request_id for result in rb.complete_many(requests(), max_in_flight=8)]
    say({"errors": sorted(errors), "processes": len(pids - {os.getpid()}), "results": len(set(results))})


def own(url: str, fleet: str) -> int:
    """Complete a request with a new client of this process; return the number of its tokens."""
    with rollbus.sync.connect(url, fleet=fleet) as rb:
        rb.fleet.wait_for_workers()
        return len(rb.complete(short("own")).token_ids)


def error_of(call: Callable[[], object]) -> str:
    """Return the class name of the error that a call raises, or an empty string."""
    try:
        call()
    except rollbus.RollbusError as exc:
        return type(exc).__name__
    return ""


def say(value: object) -> None:
    """Print a value as one line of JSON and flush it."""
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # A shell starts background programs with SIGINT ignored, and their child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]](sys.argv[2], sys.argv[3])
