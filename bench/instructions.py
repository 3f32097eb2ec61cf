"""Counts what a request and a token cost in Python, in units that a busy machine does not change.

    python -m bench.instructions [--check | --record | --costs] [--functions 10] [--rounds 6] [--json FILE]

`instructions` are executed bytecode instructions and `c_calls` calls of C functions, of the caller's thread, the
client's bus thread and the worker, each with the libraries that they call. `whole` is a request of `complete_many` with
16 tokens, `stream` a request of `generate` without its tokens, `token` one token of a stream. 16 requests run at once.
A figure is the least of the rounds: what else happens can only add.

The server is a real nats-server. Everything else is in lockstep, so that the counts repeat: the worker reads requests
when the server has all of them, the engine starts when it has all of them, and a step of streams starts when the caller
has read the step before. Time stands still in a round, so presence and leases cost nothing. The synthetic engine is not
counted. The time that C code takes is not visible: `python -m bench --compare COMMIT transport` measures it.

`instructions.json` has the figures of this commit. `--check` fails if instructions differ by more than 3 %, or C calls
by more than 5 %, and `--record` writes the file. `--functions` prints the functions with most instructions. `--costs`
prints the instructions of each feature in all threads: those between call and return of its functions (`FEATURES`), and
the checks for spans. Each way fails if no function of a feature ran.
"""

import argparse
import asyncio
import gc
import json
import linecache
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar, Final
from unittest import mock

import uvloop

import rollbus
from bench.compare import COUNTS
from bench.processes import bus_request
from bench.report import Report, program
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch
from rollbus.bus.queue import puller
from rollbus.frontend.cli.tables import spreads
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.options import arg, flag
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker

RECORDED: Final = Path(__file__).with_suffix(".json")
LIBRARIES: Final = {"python": "{}.{}".format(*sys.version_info), "nats-py": version("nats-py")}
"""Versions of which the recorded figures are. With others, the figures are shown and not judged."""
REQUESTS: Final = 16
WHOLE, SHORT, LONG = (True, 16), (False, 4), (False, 20)
"""Whole results or streams, and the tokens of each request."""
LOADS: Final = (WHOLE, SHORT, LONG)
SPANS: Final = "spans"
GUARD: Final = re.compile(r"^(?!.*\bCall\().*\b(spans|tracer)\b")
"""Lines of the checks whether a call has spans."""
FEATURES: Final = {
    "timelines": ("/telemetry/requests.py:", ":WorkerRequestTable._begin_timeline"),
    "counters": (":WorkerLinkStats.", "/engines/rates.py:", ":DurationsByModel.", ":BatchTimes."),
    "experts": (":ExpertCounter.", "/telemetry/experts.py:"),
    SPANS: ("/tracing/", ":CallSpans."),
    "placement": ("/client/placement.py:", "/queue/placement.py:", "/queue/load.py:"),
    "shares": ("/queue/fairness.py:", ":PullPlan._count_shares"),
    "versions of KV": (":kv_arrays",),
    "checks of requests": (
        "/schemas/checks.py:",
        "/schemas/request_fields.py:",
        "/requests/admission.py:",
        ":RequestIntake._check",
    ),
    "checks of steps": (":ChunkWriter._check", ":check_batch", ":check_row_kind", ":check_mask"),
    "checks of chunks": (":ChunkVerifier.", ":Chunk.__post_init__", ":ResultCheck.", ":are_within"),
}
"""Parts of the file and name of the functions of each feature."""
THREADS: Final = ("caller", "bus", "worker")
NOT_COUNTED: Final = (__file__, "/workers/engines/synthetic/")
FAR_S: Final = 3600.0
SOON_S: Final = 0.2
"""Longest delay of a timer that fires at the end of a round. Acks of frames have such timers."""
NEXT_STEP: Final = "If this is intended, run `python -m bench.instructions --record`, and say why in the commit."
WAIT_S: Final = 60.0
QUIET_S: Final = 0.01
"""Seconds between two looks whether the threads have something to do."""


Function = tuple[CodeType, str]
"""A function, and the feature for which it runs; empty: none."""


class Tally:
    """Counts the instructions and C calls of one thread, by function."""

    def __init__(self) -> None:
        self._instructions = {feature: Counter[CodeType]() for feature in ("", *FEATURES)}
        self._c_calls = Counter[CodeType]()

    def start(self, *_event: object) -> None:
        """Count in this thread from now on. This is also the first trace function of a new thread."""
        c_calls, traces = self._c_calls, dict[CodeType, Any]()

        def counter(instructions: Counter[CodeType]) -> Callable[..., object]:
            def count(frame: FrameType, event: str, _arg: object) -> object:
                if event == "opcode":
                    instructions[frame.f_code] += 1
                return count

            return count

        def guarded(offsets: set[int]) -> Callable[..., object]:
            other, guards = self._instructions[""], self._instructions[SPANS]

            def count(frame: FrameType, event: str, _arg: object) -> object:
                if event == "opcode":
                    (guards if frame.f_lasti in offsets else other)[frame.f_code] += 1
                return count

            return count

        counters = {feature: counter(instructions) for feature, instructions in self._instructions.items()}
        of_features = set(counters.values()) - {counters[""]}

        def enter(frame: FrameType, _event: str, _arg: object) -> Any:
            code = frame.f_code
            if code not in traces:
                is_counted = not any(part in code.co_filename for part in NOT_COUNTED)
                traces[code] = counters[feature_of(code)] if is_counted else None
                if is_counted and not feature_of(code) and (offsets := guards_of(code)):
                    traces[code] = guarded(offsets)
            frame.f_trace_lines, frame.f_trace_opcodes = False, traces[code] is not None
            # What a function of a feature calls belongs to the feature too.
            above = None if frame.f_back is None else frame.f_back.f_trace
            return above if above in of_features and traces[code] else traces[code]

        def call(frame: FrameType, event: str, _arg: object) -> None:
            if event == "c_call" and traces.get(frame.f_code):
                c_calls[frame.f_code] += 1

        sys.setprofile(call)
        sys.settrace(enter)

    @property
    def num_instructions(self) -> int:
        """Number of instructions so far."""
        return sum(sum(list(each.values())) for each in self._instructions.values())

    def copy(self) -> tuple[Counter[Function], Counter[Function]]:
        """Return both counts so far. The thread may run meanwhile."""
        copies = {feature: dict(each) for feature, each in self._instructions.items()}
        instructions = {(code, feature): count for feature, each in copies.items() for code, count in each.items()}
        return Counter(instructions), Counter({(code, ""): count for code, count in dict(self._c_calls).items()})


def guards_of(code: CodeType) -> set[int]:
    """Return the offsets of the instructions that find out that spans are off."""
    lines = {line: GUARD.search(linecache.getline(code.co_filename, line)) for *_, line in code.co_lines() if line}
    return {offset for start, end, line in code.co_lines() if lines.get(line or 0) for offset in range(start, end, 2)}


def feature_of(code: CodeType) -> str:
    """Return the feature to which a function belongs, or an empty string."""
    place = f"{code.co_filename}:{code.co_qualname}"
    return next((name for name, parts in FEATURES.items() if any(part in place for part in parts)), "")


class StillLoop(uvloop.Loop):
    """A loop for which time passes only in `pass_time`, while `is_still`."""

    loops: ClassVar[list["StillLoop"]] = []
    is_still = False
    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.loops.append(self)
        self._soon: list[tuple[asyncio.TimerHandle, Callable[..., object], tuple[Any, ...]]] = []

    @classmethod
    def shown(cls) -> float:
        """Return the time that stands still."""
        return cls.now

    def time(self) -> float:
        """Return the time of this process."""
        return time.monotonic()

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call `callback` after `delay` seconds. While `is_still`, call it in `pass_time` or never."""
        if not self.is_still or delay <= 0:
            return super().call_later(delay, callback, *args, context=context)
        handle = super().call_later(FAR_S, callback, *args, context=context)
        if delay <= SOON_S:
            self._soon.append((handle, callback, args))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call `callback` at a time of this loop."""
        return self.call_later(when - self.time(), callback, *args, context=context)

    def _fire(self) -> None:
        soon, self._soon = self._soon, []
        for handle, callback, args in soon:
            if not handle.cancelled():
                handle.cancel()
                callback(*args)

    @classmethod
    def pass_time(cls) -> None:
        """Let `SOON_S` pass in all loops."""
        cls.now += SOON_S
        for loop in cls.loops:
            loop.call_soon_threadsafe(loop._fire)


class SteppedEngine(SyntheticEngine):
    """Starts requests when it has all of a round, and makes a step for each permit."""

    def __init__(self) -> None:
        super().__init__(SyntheticConfig(max_num_seqs=REQUESTS))
        self.loop = asyncio.get_running_loop()
        self.permits = asyncio.Semaphore(0)
        self._waiting_for_all: list[tuple[str, rollbus.GenerateRequest, KvTransfer | None]] = []

    async def add(self, key: str, request: rollbus.GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Queue a request. The last request of a round starts all of them."""
        self._waiting_for_all.append((key, request, kv))
        if len(self._waiting_for_all) == REQUESTS:
            for each in self._waiting_for_all:
                await super().add(*each)
            self._waiting_for_all.clear()

    async def steps(self) -> AsyncIterator[Sequence[RequestStep | TokenBatch]]:
        """Yield the output of each step. Wait for a permit before the next one."""
        async for output in super().steps():
            yield output
            await self.permits.acquire()


Counts = dict[str, tuple[Counter[Function], Counter[Function]]]
"""By thread: instructions and C calls of one round."""
Load = tuple[bool, int]
Cost = dict[Function, float]
"""By function: instructions or C calls of one request or token."""


class Bus:
    """A worker and a client with a caller, each in its own thread.

    Args:
        server: the server of the bus.
    """

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self.tallies = {thread: Tally() for thread in THREADS}
        self._worker = Future[tuple[SteppedEngine, Callable[[], None]]]()
        self._client = Future[tuple[asyncio.AbstractEventLoop, rollbus.Client]]()
        self._is_over = asyncio.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(self.tallies["worker"], self._serve()), daemon=True),
            threading.Thread(target=self._run, args=(self.tallies["caller"], self._connect()), daemon=True),
        ]

    def __enter__(self) -> "Bus":
        for thread in self._threads:
            thread.start()
        self.engine, self._stop = self._worker.result(WAIT_S)
        self.loop, self.rb = self._client.result(WAIT_S)
        return self

    def __exit__(self, *_error: object) -> None:
        self.loop.call_soon_threadsafe(self._is_over.set)
        self._threads[1].join(WAIT_S)
        self.engine.loop.call_soon_threadsafe(self._stop)
        self._threads[0].join(WAIT_S)

    @staticmethod
    def _run(tally: Tally, main: Coroutine[Any, Any, None]) -> None:
        tally.start()
        with asyncio.Runner(loop_factory=StillLoop) as runner:
            runner.run(main)

    async def _serve(self) -> None:
        engine = SteppedEngine()
        config = WorkerConfig(
            nats_url=self._server.url, fleet="default", model="synthetic", worker_id="w", lease_s=60.0, listen_s=0.0
        )
        worker = Worker(config, engine)
        self._worker.set_result((engine, worker.stop))
        await worker.run()

    async def _connect(self) -> None:
        threading.settrace(self.tallies["bus"].start)
        async with rollbus.connect(self._server.url) as rb:
            threading.settrace(None)
            await rb.fleet.wait_for_workers()
            self._client.set_result((asyncio.get_running_loop(), rb))
            await self._is_over.wait()

    def count(self, load: Load) -> Counts:
        """Run one round, and return what it costs."""
        is_whole, tokens = load
        requests = [bus_request(list(range(32)), tokens, routing=False) for _ in range(REQUESTS)]
        before = {thread: tally.copy() for thread, tally in self.tallies.items()}
        may_read = threading.Event()
        self.engine.loop.call_soon_threadsafe(may_read.wait)
        self.engine.permits = asyncio.Semaphore(tokens if is_whole else 0)
        main = self._complete(requests) if is_whole else self._stream(requests, tokens)
        done = asyncio.run_coroutine_threadsafe(main, self.loop)
        self._wait_until_quiet()
        may_read.set()
        done.result(WAIT_S)
        self._wait_until_quiet()
        StillLoop.pass_time()
        self._wait_until_quiet()
        after = {thread: tally.copy() for thread, tally in self.tallies.items()}
        return {
            thread: (after[thread][0] - before[thread][0], after[thread][1] - before[thread][1]) for thread in after
        }

    async def _complete(self, requests: Sequence[rollbus.GenerateRequest]) -> None:
        async for generation in self.rb.complete_many(requests, max_in_flight=REQUESTS):
            if generation.error is not None:
                raise RuntimeError(f"no result: {generation.error}")

    async def _stream(self, requests: Sequence[rollbus.GenerateRequest], tokens: int) -> None:
        num_unread = [REQUESTS] * tokens

        async def read(request: rollbus.GenerateRequest) -> None:
            num_read = 0
            async for chunk in self.rb.generate(request):
                for at in range(num_read, num_read := num_read + len(chunk.token_ids)):
                    num_unread[at] -= 1
                    if not num_unread[at]:
                        self.engine.loop.call_soon_threadsafe(self.engine.permits.release)

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(read(request))

    def _wait_until_quiet(self) -> None:
        """Wait until all other threads, and those of the server, have nothing to do."""
        last: list[int] = []
        while last != (last := [tally.num_instructions for tally in self.tallies.values()]) or self._is_busy():
            time.sleep(QUIET_S)

    def _is_busy(self) -> bool:
        """Return True if a thread runs or waits for a core. The count of a thread without a core does not change."""
        states = (
            task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
            for process in ("self", self._server.pid)
            for task in Path(f"/proc/{process}/task").iterdir()
            if task.name != str(threading.get_native_id())
        )
        with suppress(OSError):  # a thread may end meanwhile
            return any(state != "S" for state in states)
        return True


async def measure(rounds: int) -> dict[Load, list[Counts]]:
    """Return the counts of each round of each load."""
    # Pulls that wait for requests would end every second.
    standing = b'{"batch":1,"expires":%d}' % int(FAR_S * 1e9)
    async with EmbeddedServer() as server:
        with (
            mock.patch.object(uvloop, "new_event_loop", StillLoop),
            mock.patch.object(puller, "_STANDING", standing, create=True),
            Bus(server) as bus,
        ):
            # The first requests wait for presence and load modules.
            for load in (WHOLE, SHORT):
                bus.count(load)
            gc.collect()
            gc.disable()
            sys.setswitchinterval(FAR_S)
            StillLoop.now, StillLoop.is_still = time.monotonic(), True
            with mock.patch.object(time, "monotonic", StillLoop.shown):
                measured = {load: [bus.count(load) for _ in range(rounds)] for load in LOADS}
            StillLoop.is_still = False
    return measured


def costs(measured: Mapping[Load, Sequence[Counts]], thread: str, kind: int) -> dict[str, Cost]:
    """Return the costs of a whole request, of a stream without its tokens, and of a token of it."""
    whole, short, long = (min((one[thread][kind] for one in measured[load]), key=Counter.total) for load in LOADS)
    token = {code: (long[code] - short[code]) / REQUESTS / (LONG[1] - SHORT[1]) for code in short | long}
    stream = {code: short[code] / REQUESTS - SHORT[1] * token[code] for code in token}
    return {"whole": {code: count / REQUESTS for code, count in whole.items()}, "stream": stream, "token": token}


def write_functions(cost: Cost, most: int) -> None:
    """Write the functions with most instructions to stderr."""
    for function in sorted(cost, key=cost.__getitem__, reverse=True)[:most]:
        code, feature = function
        place = "/".join(Path(code.co_filename).parts[-2:])
        line = f"{cost[function]:12.1f}  {code.co_qualname}  {place}:{code.co_firstlineno}  {feature}"
        sys.stderr.write(f"{line.rstrip()}\n")


def differences(counts: Mapping[str, Mapping[str, float]], recorded: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each figure that differs from the recorded one by more than its noise."""
    return [
        f"{name}: {old:,} {column} are now {new:,} ({new / old - 1:+.1%})"
        for name, figures in counts.items()
        for column, new in figures.items()
        if abs(new / (old := recorded[name][column]) - 1) > COUNTS[column]
    ]


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure, and check or record the figures."""
    measured = asyncio.run(measure(args.rounds))
    works = [item for thread in THREADS for item in costs(measured, thread, 0).items()]
    for feature in (*FEATURES, ""):
        cost_of = Counter[str]()
        for work, cost in works:
            cost_of[work] += round(sum(n for (_, its), n in cost.items() if feature in {its, ""}))
        if not cost_of.total():
            sys.exit(f"no function of {feature!r} ran; expected those of FEATURES in {__file__}")
        if args.costs:
            report.add(feature=feature or "everything", **cost_of)
    if args.costs:
        return
    counts: dict[str, dict[str, float]] = {}
    for thread in THREADS:
        each = {name: costs(measured, thread, kind) for kind, name in enumerate(COUNTS)}
        for work, functions in each["instructions"].items():
            total = counts[f"{work} {thread}"] = {name: round(sum(one[work].values()), 1) for name, one in each.items()}
            report.add(work=work, thread=thread, **spreads([total]))
            write_functions(functions, args.functions)
    if args.record:
        RECORDED.write_text(json.dumps({"libraries": LIBRARIES, "counts": counts}, indent=1) + "\n")
    elif args.check:
        recorded = json.loads(RECORDED.read_text())
        if recorded["libraries"] != LIBRARIES:
            sys.stderr.write(f"not judged: {RECORDED.name} is of {recorded['libraries']}, not of {LIBRARIES}\n")
        elif lines := differences(counts, recorded["counts"]):
            sys.exit("\n".join([*lines, NEXT_STEP]))


if __name__ == "__main__":
    program(
        "instructions",
        "Count what a request and a token cost in Python.",
        run,
        flag("--check", "fail if a figure differs from the recorded one by more than 3 %%"),
        flag("--record", "write the figures to bench/instructions.json"),
        flag("--costs", "print the instructions of each feature instead"),
        arg("--functions", None, "number of functions to print (default: %(default)s)", type=int, default=0),
        rounds=6,
    )
