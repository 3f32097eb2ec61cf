"""Compares ways to place requests: queue only, static shards, a simple rule, and prefixes with groups.

    python -m bench.placement [--fleets simulated synthetic vllm] [--traces groups ...] [--ways queue ours ...]
                              [--simulated 64] [--workers 4] [--vllm-workers 2] [--rounds 3] [--dynamo PYTHON]
                              [--json FILE]

The traces are in `bench.placement_traces`. The ways are in `bench.placement_choices` (simulated) and in
`bench.placement_ways` (on a bus). All ways play the same trace in turns. On a bus, all caches are flushed before each
turn, and each turn ends after `PLAY_S`: the figures are those of the requests until then. Without options, the bench
plays the recorded traces and ways in a quarter of an hour. All traces and ways take an hour.

`throughput` is tokens per second divided by those of `queue` in the same round. `computed` is the number of prompt
tokens that engines computed, divided by that of a single engine with an unlimited cache. `wait_p50_s` and `wait_p99_s`
are times to the first token. `wait_s` is the longest of them. On a bus, `wait_s` is the longest time in which an open
sample received no token, for example after a kill. `lost` is the number of samples without all of their tokens. Beside
a flood, times are those of the client that does not flood, and tokens are those of both clients. `p99_longest` is the
time to 99 % of the samples, divided by the time of the queue if the trainer sends the longest samples first. Only a
trainer that knows the lengths can do this. `decision_us` is the median of the real time of a decision in the
simulation.

With `--dynamo`, Dynamo's KV router is compared with its round robin, on its own mocker, with the same traces.

One dependency of Dynamo (`aisimulate`) has no wheel on PyPI, and Dynamo's replay does not need it. So install Dynamo
into a separate environment:

    python -m venv DIR; DIR/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    DIR/bin/pip install typing_extensions pydantic pyyaml
"""

import argparse
import asyncio
import itertools
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

import rollbus
from bench.placement_choices import LeastLoaded, Moving, Ours, RoundRobin, Simple, Spill, Static
from bench.placement_sim import EngineShape, QueueOnly, Simulation
from bench.placement_traces import GROUP, TRACES, Shape, Tokens, Trace, block_keys, least_computed, make_trace
from bench.placement_ways import SLOW, WAYS
from bench.processes import START_S, Way, own_process, worker_process
from bench.report import TINY_MOE, Report, program
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import percentile, spreads
from rollbus.schemas.options import arg

MODES: Final = {"dynamo, round robin": "round_robin", "dynamo, kv": "kv_router"}
"""Ways and Dynamo's names for them."""
SCRIPT: Final = Path(__file__).with_name("placement_dynamo.py")


def _prompts(trace: Trace) -> Iterator[tuple[str, int, Tokens, int]]:
    """Yield session, number of samples, prompt and number of tokens of each request. Outputs are random."""
    outputs = np.random.default_rng(0)
    for conversation in trace.conversations:
        before = np.empty(0, np.int32)
        for turn in conversation.turns:
            prompt = np.concatenate([before, turn.new_tokens])
            yield conversation.name, conversation.samples, prompt, turn.max_tokens
            before = np.concatenate([prompt, outputs.integers(10, 500, turn.max_tokens, np.int32)])


def trace_lines(trace: Trace, block_tokens: int) -> Iterator[str]:
    """Yield the lines of a trace in Mooncake's format.

    A number stands for each block of a prompt together with all blocks before it.
    """
    numbers: dict[int, int] = {}
    begun: set[str] = set()
    for name, samples, prompt, max_tokens in _prompts(trace):
        # Append a token, because the last block counts here too.
        keys = block_keys(np.append(prompt, np.int32(0)), block_tokens)
        blocks = [numbers.setdefault(key, len(numbers)) for key in keys]
        if len(prompt) % block_tokens:
            blocks.append(numbers.setdefault(hash(prompt.tobytes()), len(numbers)))
        for sample in range(samples):
            session = f"{name}/{sample}"
            when = {"delay": 0} if session in begun else {"timestamp": 0}
            begun.add(session)
            sizes = {"input_length": len(prompt), "output_length": max_tokens, "hash_ids": blocks}
            yield json.dumps({"session_id": session, **when, **sizes})


async def play_on_dynamo(python: Path, trace: Trace, mode: str, num_workers: int, shape: EngineShape) -> dict[str, Any]:
    """Play a trace. Return the data from which `bench.placement` computes figures.

    Raises:
        RuntimeError: Dynamo did not play the whole trace.
    """
    engine = {
        "num_gpu_blocks": shape.cache_tokens // shape.block_tokens,
        "block_size": shape.block_tokens,
        "max_num_seqs": shape.slots,
        "max_num_batched_tokens": 8192,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(f"{line}\n" for line in trace_lines(trace, shape.block_tokens))
        file.flush()
        in_flight = max(trace.max_in_flight, GROUP)
        process = await asyncio.create_subprocess_exec(
            *(python, SCRIPT, file.name, str(num_workers), str(in_flight), mode, str(shape.block_tokens)),
            json.dumps(engine),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"DYN_LOG": "error"},
        )
        output, _ = await process.communicate()
    requests = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    if process.returncode or len(requests) != sum(samples for _, samples, _, _ in _prompts(trace)):
        raise RuntimeError(f"Dynamo exited with code {process.returncode} after {len(requests)} requests")
    return {
        "computed": sum(one["input_length"] - one["reused_input_tokens"] for one in requests),
        "least": least_computed(((prompt, [prompt] * n) for _, n, prompt, _ in _prompts(trace)), shape.block_tokens),
        "tokens": trace.num_tokens,
        "seconds": max(one["terminal_time_ms"] for one in requests) / 1000,
        "ended_s": [one["terminal_time_ms"] / 1000 for one in requests],
        "first_s": [one["ttft_ms"] / 1000 for one in requests],
    }


BUSY: Final = 0.75
"""Share of the slots that a trainer fills. Without free slots, there is no choice between workers."""
SIMULATED: Final[Mapping[str, Callable[[], QueueOnly]]] = {
    "queue": QueueOnly,
    "static": Static,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "moving": Moving,
    "simple": Simple,
    "spill": Spill,
    "ours": Ours,
}
SIMULATED_TRACES: Final = tuple(name for name in TRACES if name not in {"race", "aside"})
"""Traces without faults and with one client."""
COMPARED: Final = ("tokens_per_s", "p99_s")
"""Figures without a column. Other columns are ratios of these figures."""
RECORDED_SIMULATED: Final = ("groups", "flood", "tails", "nothing", "slow-nothing", "mixed")
LARGE: Final = 32
"""Simulated fleets above this number of workers play each trace once, because some traces take minutes."""
IDLE_S: Final = 1.0
"""Seconds between two checks whether the fleet is idle. Aborts wait for a step, which may prefill for many seconds."""
PLAY_S: Final = 300.0
"""Maximum seconds of a turn: coding agents with tools in a full fleet take about this long on two idle cores. A turn to
warm up has a tenth."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers on a bus.

    Args:
        model_args: arguments of each worker, without those of its engine.
    """

    name: str
    model_args: tuple[str, ...]
    engine_args: Mapping[str, Any]
    slow_args: Mapping[str, Any] | None
    """Arguments that differ for an engine with half the speed. None: the engine cannot be slower."""
    slots: int
    block_tokens: int
    caches_outputs: bool
    """True if generated tokens stay in the prefix cache too."""
    shape: Shape
    """Size of the traces for one worker."""
    recorded: tuple[str, ...]
    """Traces that are played if --traces is not set."""


FLEETS: Final = {
    "synthetic": Fleet(
        name="synthetic",
        model_args=("--engine", "synthetic", "--model", "synthetic", "--lease-s", "3"),
        engine_args={
            "step_s": 0.01,
            "max_num_seqs": 16,
            "prefill_token_s": 0.0001,
            "prefix_cache": True,
            "prefix_cache_tokens": 200_000,
            "num_experts": 0,
        },
        slow_args={"step_s": 0.02, "prefill_token_s": 0.0002},
        slots=16,
        block_tokens=16,
        caches_outputs=False,
        shape=Shape(slots=16, rounds=2, long=64),
        recorded=("groups", "flood", "agents", "nothing", "race", "aside"),
    ),
    "vllm": Fleet(
        name="vllm",
        model_args=("--model", str(TINY_MOE)),
        engine_args={
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 8192,
            "max_num_seqs": 16,
            "block_size": 32,
            "kv_cache_memory_bytes": 1 << 28,
        },
        slow_args=None,
        slots=16,
        block_tokens=32,
        caches_outputs=True,
        shape=Shape(slots=16, rounds=2, long=64),
        recorded=("groups", "prefill", "agents", "nothing"),
    ),
}


def simulate(trace: Trace, way: str, num_workers: int, shape: EngineShape) -> dict[str, float]:
    """Play a trace in a simulated fleet. Return its figures."""
    played = Simulation(trace, SIMULATED[way](), shape, num_workers)
    played.run()
    least = least_computed(((job.prompt, [job.sequence]) for job in played.jobs), shape.block_tokens)
    return {
        "computed": sum(engine.prefilled for engine in played.engines.values()) / least,
        "tokens_per_s": trace.num_tokens / max(job.ended_at for job in played.jobs),
        "p99_s": percentile([job.ended_at for job in played.jobs], 99),
        **waits([job.first_at - job.arrived_at for job in played.jobs]),
        "placed_percent": 100 * (played.placed - played.refused) / len(played.jobs),
        "decision_us": 1e6 * percentile(played.decisions_s, 50),
    }


def waits(first_s: Sequence[float]) -> dict[str, float]:
    """Return the figures of the times to the first tokens."""
    return {"wait_p50_s": percentile(first_s, 50), "wait_p99_s": percentile(first_s, 99), "wait_s": max(first_s)}


def add_rows(
    report: Report, fleet: str, trace: str, found: Mapping[str, Sequence[Mapping[str, float]]], baseline: str = "queue"
) -> None:
    """Add a row for each way with the figures of all rounds."""
    for way, rounds in found.items():
        compared = [
            {"throughput": own["tokens_per_s"] / base["tokens_per_s"], **own}
            for own, base in zip(rounds, found[baseline], strict=True)
        ]
        if "longest" in found and way != "longest":
            compared = [
                {**own, "p99_longest": own["p99_s"] / longest["p99_s"]}
                for own, longest in zip(compared, found["longest"], strict=True)
            ]
        rows = [{name: value for name, value in one.items() if name not in COMPARED} for one in compared]
        report.add(fleet=fleet, trace=trace, way=way, **spreads(rows))


def longest_first(trace: Trace) -> Trace:
    """Return the trace in the order in which a trainer that knows all lengths sends it."""
    ordered = sorted(trace.conversations, key=lambda one: -one.num_tokens)
    return replace(trace, conversations=tuple(ordered))


def run_simulated(args: argparse.Namespace, report: Report) -> None:
    """Add the rows of all simulated fleets."""
    engine = EngineShape()
    for num_workers in args.simulated:
        for name in [name for name in args.traces or RECORDED_SIMULATED if name in SIMULATED_TRACES]:
            found: dict[str, list[dict[str, float]]] = {}
            for seed in range(args.rounds if num_workers <= LARGE else 1):
                slots = num_workers * engine.slots
                trace = make_trace(name, Shape(slots=slots, busy=BUSY, long=256, seed=seed))
                for way in args.ways:
                    found.setdefault(way, []).append(simulate(trace, way, num_workers, engine))
                if name == "tails":
                    ordered = longest_first(trace)
                    found.setdefault("longest", []).append(simulate(ordered, "queue", num_workers, engine))
            add_rows(report, f"{num_workers} simulated", make_trace(name, Shape(slots=8)).name, found)


async def keep_worker(url: str, *worker_args: str) -> None:
    """Run a worker until cancelled. After a kill, start another worker."""
    while True:
        async with worker_process(url, *worker_args) as worker:
            await worker.wait()


@asynccontextmanager
async def started(
    fleet: Fleet, num_workers: int, num_slow: int, ways: Sequence[str]
) -> AsyncIterator[tuple[rollbus.Client, dict[str, Way]]]:
    """Start a fleet, a client for the bench, and a process for each way."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        save_file({"weight": np.zeros(4, np.float32)}, Path(folder, "model.safetensors"))
        server = await stack.enter_async_context(EmbeddedServer())
        rb = await stack.enter_async_context(rollbus.connect(server.url))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for number in range(num_workers):
            is_slow = number < num_slow
            engine_args = {**fleet.engine_args, **((is_slow and fleet.slow_args) or {})}
            options = ["--engine-args", json.dumps(engine_args), "--weight-root", folder]
            options += ["--worker-id", f"{SLOW}{number}", "--listen-s", "0"] if is_slow else []
            worker = tasks.create_task(keep_worker(server.url, *fleet.model_args, *options))
            stack.callback(worker.cancel)
            # Start the engines one after the other. Engines that start at the same time count the same free memory.
            await rb.fleet.wait_for_workers(number + 1, timeout_s=START_S)
        players = {}
        for way in ways:
            numbers = (fleet.slots, fleet.block_tokens, int(fleet.caches_outputs))
            player = own_process(way, "placement_ways:play", way, server.url, *numbers, folder)
            players[way] = await stack.enter_async_context(player)
        yield rb, players


async def measure(
    rb: rollbus.Client, players: Mapping[str, Way], name: str, rounds: int, shape: Shape
) -> dict[str, list[dict[str, float]]]:
    """Let all ways play a trace in turns. Return the figures of each round by way."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in players}
    num_workers = len(rb.fleet.workers)
    # The first round warms up engines and clients. Its figures do not count.
    for number in range(rounds + 1):
        for way, player in players.items():
            # Wait until a worker that was killed in the last turn serves again, and until no request of a flood is
            # left.
            await rb.fleet.wait_for_workers(num_workers, timeout_s=START_S)
            while True:
                if not any(worker.in_flight for worker in (await rb.fleet.state()).workers):
                    # A worker may just have pulled requests that their client has aborted.
                    with suppress(rollbus.CommandIncomplete):
                        await rb.fleet.flush_cache()
                        break
                await asyncio.sleep(IDLE_S)
            drawn = replace(shape, seed=number, rounds=shape.rounds if number else 1)
            question = json.dumps(asdict(drawn), separators=(",", ":"))
            answer = await player.ask(name, question, PLAY_S if number else PLAY_S / 10)
            if number:
                placed = {"placed_percent": 100 * (answer["placed"] - answer["refused"]) / len(answer["ended_s"])}
                found[way].append({**_figures(answer), "wait_s": answer["silent_s"], "lost": answer["lost"], **placed})
    return found


def _figures(answer: Mapping[str, Any]) -> dict[str, float]:
    return {
        "computed": answer["computed"] / answer["least"],
        "tokens_per_s": answer["tokens"] / answer["seconds"],
        "p99_s": percentile(answer["ended_s"], 99),
        **waits(answer["first_s"]),
    }


async def run_fleet(fleet: Fleet, num_workers: int, args: argparse.Namespace, report: Report) -> None:
    """Add the rows of a fleet on a bus. Traces with a slow worker use a separate fleet."""
    shape = replace(fleet.shape, slots=fleet.slots * num_workers, busy=BUSY)
    by_slow: dict[int, list[str]] = {}
    for name in args.traces or fleet.recorded:
        by_slow.setdefault(make_trace(name, shape).num_slow, []).append(name)
    for num_slow, names in by_slow.items():
        if num_slow and fleet.slow_args is None:
            continue
        # The simple rule is only simulated.
        async with started(fleet, num_workers, num_slow, [way for way in args.ways if way in WAYS]) as (rb, players):
            for name in names:
                found = await measure(rb, players, name, args.rounds, shape)
                add_rows(report, f"{num_workers} {fleet.name}", make_trace(name, shape).name, found)


async def run_dynamo(args: argparse.Namespace, report: Report) -> None:
    """Add the rows of Dynamo's router on its mocker, with the same number of workers as the simulated fleets."""
    shape = EngineShape()
    for num_workers in args.simulated:
        for name in [name for name in args.traces or TRACES if name in SIMULATED_TRACES]:
            slots = num_workers * shape.slots
            found: dict[str, list[dict[str, float]]] = {way: [] for way in MODES}
            for seed, (way, mode) in itertools.product(range(args.rounds), MODES.items()):
                trace = make_trace(name, Shape(slots=slots, busy=BUSY, long=256, seed=seed))
                # All workers of the mocker have the same speed.
                if not trace.num_slow:
                    answer = await play_on_dynamo(args.dynamo, trace, mode, num_workers, shape)
                    found[way].append(_figures(answer))
            if found["dynamo, kv"]:
                add_rows(report, f"{num_workers} mocked", trace.name, found, baseline="dynamo, round robin")


def _run(args: argparse.Namespace, report: Report) -> None:
    if "queue" not in args.ways:
        args.fail("--ways must include queue, because the other ways are compared with it")
    if "simulated" in args.fleets:
        run_simulated(args, report)
        if args.dynamo is not None:
            asyncio.run(run_dynamo(args, report))
    for name, fleet in FLEETS.items():
        if name in args.fleets:
            num_workers = args.vllm_workers if name == "vllm" else args.workers
            asyncio.run(run_fleet(fleet, num_workers, args, report))


if __name__ == "__main__":
    program(
        "placement",
        "Compare ways to place requests.",
        _run,
        arg("--fleets", ["simulated", *FLEETS], "", nargs="+", default=["simulated", *FLEETS]),
        arg("--traces", list(TRACES), "traces (default: the recorded traces)", nargs="+"),
        arg("--ways", list(SIMULATED), "ways; must include queue (default: %(default)s)", nargs="+", default=WAYS),
        arg("--simulated", None, "simulated workers (default: %(default)s)", type=int, nargs="+", default=[64]),
        arg("--workers", None, "workers with synthetic engines (default: %(default)s)", type=int, default=4),
        arg("--vllm-workers", None, "workers with vLLM and a tiny MoE (default: %(default)s)", type=int, default=2),
        arg("--dynamo", None, "Python executable of an environment with Dynamo (default: no Dynamo)", type=Path),
        rounds=3,
    )
