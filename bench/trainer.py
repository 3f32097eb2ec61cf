"""Measures time and memory from the wire to the tensors of a training step, for rollbus and for HTTP servers.

    python -m bench.trainer [--tokens 32768] [--prompt-tokens 4096 31744] [--rounds 9]
                            [--samples 1000] [--sample-tokens 128 256 512 1024] [--json FILE]

The HTTP ways use base64 in JSON. The bench measures a sequence of 48 layers and top-8 with each number of prompt
tokens. The other tokens are sampled. All ways must give the same tensors. Their rounds take turns. Messages are in
memory, so the network is not measured. `bench.trainer_ways` describes the ways. `bench.trainer_peak` measures memory.

Then the bench stitches and packs conversations of 4 turns each, with several lengths. The milliseconds should be
proportional to the bytes. The last row describes the line through the other rows: the time per megabyte, the time at 0
MB, and the largest distance of a measurement from the line, as a share of its own time.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

import rollbus
from bench.report import Report, add_arguments
from bench.trainer_peak import write_messages
from bench.trainer_ways import NUM_LAYERS, TOP_K, WAYS, Rollout, differences, make_rollout, tensor_bytes
from rollbus.frontend.cli.tables import Spread, Value, in_turns
from rollbus.schemas.chunk import FinishReason
from rollbus.trainer import MicroBatch, Stitcher, pack

ROOT = Path(__file__).resolve().parent.parent
MEGABYTE = 10**6
NUM_TURNS = 4
MAX_TOKENS = 32_768
"""Maximum predictions in a micro-batch."""
T = TypeVar("T")
Turns = list[tuple[npt.NDArray[np.int32], rollbus.Generation]]
"""The turns of a conversation: each prompt and the generation that follows it."""


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of `run` and its result. Garbage of earlier code is collected first."""
    gc.collect()
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def measure_ways(num_tokens: int, num_prompt: int, rounds: int) -> list[dict[str, Value]]:
    """Return the row of each way: milliseconds over `rounds`, peak memory, and bytes on the wire.

    Raises:
        ValueError: two ways give different tensors.
    """
    rollout = make_rollout(num_tokens, num_prompt)
    messages = {name: way.write(rollout) for name, way in WAYS.items()}
    sizes = check_same(rollout, messages)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for name, way in in_turns(rounds, WAYS.items()):
        taken, result = timed(partial(way.read, rollout.prompt, messages[name]))
        seconds[name].append(taken)
        # Free the tensors before the next round, so that each round finds the same free memory.
        del result
    return [
        {
            "way": way.what,
            "prompt_tokens": num_prompt,
            "sampled_tokens": num_tokens - num_prompt,
            "messages": len(messages[name]),
            "wire_mb": sum(map(len, messages[name])) / MEGABYTE,
            "ms": Spread.of([1000 * taken for taken in seconds[name]]),
            "tensors_mb": sizes[name] / MEGABYTE,
            "peak_mb": peak_of(name, messages[name], num_prompt) / MEGABYTE,
        }
        for name, way in WAYS.items()
    ]


def check_same(rollout: Rollout, messages: dict[str, list[bytes]]) -> dict[str, int]:
    """Check that all ways give the same tensors. Return the bytes of the tensors by way.

    Raises:
        ValueError: two ways give different tensors.
    """
    results = {name: way.read(rollout.prompt, messages[name]) for name, way in WAYS.items()}
    batches = {name: result for name, result in results.items() if isinstance(result, MicroBatch)}
    for name, batch in batches.items():
        for other, tensors in results.items():
            if not isinstance(tensors, MicroBatch) and (wrong := differences(batch, tensors)):
                raise ValueError(f"{name} and {other} differ in {', '.join(wrong)}")
    return {name: tensor_bytes(result) for name, result in results.items()}


def peak_of(name: str, messages: list[bytes], num_prompt: int) -> int:
    """Return the peak memory of a way in bytes, measured in a separate process."""
    with tempfile.TemporaryDirectory(prefix="rollbus-bench-") as folder:
        path = Path(folder) / "messages"
        write_messages(path, messages)
        command = [sys.executable, "-m", "bench.trainer_peak", name, str(path), str(num_prompt)]
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)


def make_conversation(index: int, num_tokens: int) -> Turns:
    """Return the turns of a conversation. Half of each turn is prompt.

    Each turn has the rows that follow those of the previous turn.
    """
    rng = np.random.default_rng(index)
    token_ids = rng.integers(0, 1000, num_tokens, np.int32)
    rows = rng.integers(0, 128, (num_tokens - 1, NUM_LAYERS, TOP_K), np.uint8)
    turns, start = [], 0
    for turn in range(NUM_TURNS):
        first, end = (num_tokens * part // (2 * NUM_TURNS) for part in (2 * turn + 1, 2 * turn + 2))
        request = rollbus.GenerateRequest(prompt_token_ids=token_ids[:first])
        generation = rollbus.Generation(
            request=request,
            request_id=request.request_id,
            child=0,
            prompt_len=first,
            token_ids=token_ids[first:end],
            logprobs=np.full(end - first, -0.5, np.float32),
            weight_versions=np.full(end - first, turn, np.int32),
            routed_experts=rows[start : end - 1].copy(),
            start=start,
            finish_reason=FinishReason.STOP,
        )
        turns.append((token_ids[:first], generation))
        start = end - 1
    return turns


def stitch_and_pack(conversations: list[Turns]) -> list[MicroBatch]:
    """Stitch and pack the conversations of a step, as a trainer does."""
    samples = []
    for turns in conversations:
        stitcher = Stitcher()
        for prompt, generation in turns:
            stitcher.add(prompt, generation)
        samples.append(stitcher.sample(advantage=1.0))
    return pack(samples, max_tokens=MAX_TOKENS)


def measure_conversations(count: int, num_tokens: int, rounds: int) -> dict[str, Value]:
    """Return the row of `count` conversations of `num_tokens` each."""
    conversations = [make_conversation(index, num_tokens) for index in range(count)]
    milliseconds = []
    for _ in range(rounds):
        seconds, batches = timed(lambda: stitch_and_pack(conversations))
        milliseconds.append(1000 * seconds)
        num_batches = len(batches)
        del batches
    megabytes = count * (num_tokens - 1) * NUM_LAYERS * TOP_K / MEGABYTE
    return {
        "way": "stitch and pack",
        "samples": count,
        "sample_tokens": num_tokens,
        "rows_mb": megabytes,
        "batches": num_batches,
        "ms": Spread.of(milliseconds),
        "mb_per_s": Spread.of([1000 * megabytes / taken for taken in milliseconds]),
    }


def check_linear(megabytes: Sequence[float], milliseconds: Sequence[float]) -> dict[str, Value]:
    """Return the row of the line through these measurements. It minimizes the squares of the relative distances."""
    sizes, taken = np.array(megabytes), np.array(milliseconds)
    per_megabyte, at_nothing = np.polyfit(sizes, taken, 1, w=1 / taken)
    off = np.abs(per_megabyte * sizes + at_nothing - taken) / taken
    return {
        "way": "linear",
        "ms_per_mb": float(per_megabyte),
        "ms_at_0_mb": float(at_nothing),
        "off_percent": 100 * float(off.max()),
    }


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.trainer", description="Measure time and memory from the wire to tensors."
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[4096, 31_744])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--sample-tokens", type=int, nargs="*", default=[128, 256, 512, 1024])
    add_arguments(parser, rounds=9)
    args = parser.parse_args()
    report = Report("trainer")
    for num_prompt in args.prompt_tokens:
        for row in measure_ways(args.tokens, num_prompt, args.rounds):
            report.add(**row)
    megabytes, milliseconds = [], []
    for num_tokens in args.sample_tokens:
        row = measure_conversations(args.samples, num_tokens, args.rounds)
        report.add(**row)
        if isinstance(row["rows_mb"], float) and isinstance(row["ms"], Spread):
            megabytes.append(row["rows_mb"])
            milliseconds.append(row["ms"].median)
    if len(megabytes) > 2:
        report.add(**check_linear(megabytes, milliseconds))
    report.finish(args.json)


if __name__ == "__main__":
    main()
