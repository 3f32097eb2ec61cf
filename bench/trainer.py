"""Seconds and memory from the wire to a training step's tensors, beside the base64-JSON of HTTP servers.

    python -m bench.trainer [--tokens 32768] [--prompt-tokens 4096 31744] [--rounds 9] [--samples 1000]
        [--sample-tokens 128 256 512 1024] [--json FILE]

One sequence of 48 layers and top-8, of which each number of prompt tokens is tried: the rest was sampled. All ways must
give the same tensors. Their rounds take turns; messages are in memory, and nothing of the network is measured. How
the ways differ is in `bench.trainer_ways`; memory is measured by `bench.trainer_peak`.

Then conversations of 4 turns each, of several lengths, are stitched and packed: seconds should follow the bytes.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

import bus
from bench.trainer_peak import write_messages
from bench.trainer_ways import NUM_LAYERS, TOP_K, WAYS, Rollout, differences, make_rollout, tensor_bytes
from schemas.chunk import FinishReason
from trainer import MicroBatch, Stitcher, pack

__all__ = ["MAX_TOKENS", "make_conversation", "measure_conversations", "measure_ways", "peak_of", "stitch_and_pack"]

ROOT = Path(__file__).resolve().parent.parent
MEGABYTE = 10**6
NUM_TURNS = 4
MAX_TOKENS = 32_768
"""Predictions in a micro-batch."""
T = TypeVar("T")
Turns = list[tuple[npt.NDArray[np.int32], bus.Generation]]
"""Of a conversation: each prompt, and what was sampled after it."""


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Seconds that `run` takes, and what it returns; without the garbage of what was before."""
    gc.collect()
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def measure_ways(num_tokens: int, num_prompt: int, rounds: int) -> list[dict[str, object]]:
    """Each way's results: seconds over `rounds`, peak memory, and bytes on the wire.

    Raises:
        ValueError: two ways give different tensors.
    """
    rollout = make_rollout(num_tokens, num_prompt)
    messages = {name: way.write(rollout) for name, way in WAYS.items()}
    sizes = check_same(rollout, messages)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            taken, result = timed(partial(way.read, rollout.prompt, messages[name]))
            seconds[name].append(taken)
            # Before the next: its tensors must find the memory as these did.
            del result
    return [
        {
            "way": way.what,
            "prompt_tokens": num_prompt,
            "sampled_tokens": num_tokens - num_prompt,
            "messages": len(messages[name]),
            "wire_mb": sum(map(len, messages[name])) / MEGABYTE,
            "best_ms": 1000 * min(seconds[name]),
            "median_ms": 1000 * statistics.median(seconds[name]),
            "tensors_mb": sizes[name] / MEGABYTE,
            "peak_mb": peak_of(name, messages[name], num_prompt) / MEGABYTE,
        }
        for name, way in WAYS.items()
    ]


def check_same(rollout: Rollout, messages: dict[str, list[bytes]]) -> dict[str, int]:
    """Refuse ways that give different tensors; returns how many bytes these take, by way."""
    results = {name: way.read(rollout.prompt, messages[name]) for name, way in WAYS.items()}
    batches = {name: result for name, result in results.items() if isinstance(result, MicroBatch)}
    for name, batch in batches.items():
        for other, tensors in results.items():
            if not isinstance(tensors, MicroBatch) and (wrong := differences(batch, tensors)):
                raise ValueError(f"{name} and {other} differ in {', '.join(wrong)}")
    return {name: tensor_bytes(result) for name, result in results.items()}


def peak_of(name: str, messages: list[bytes], num_prompt: int) -> int:
    """Peak memory of a way, in bytes, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="rollbus-bench-") as folder:
        path = Path(folder) / "messages"
        write_messages(path, messages)
        command = [sys.executable, "-m", "bench.trainer_peak", name, str(path), str(num_prompt)]
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)


def make_conversation(index: int, num_tokens: int) -> Turns:
    """The turns of a conversation, half of each a prompt: each brings the rows from where the one before ended."""
    rng = np.random.default_rng(index)
    token_ids = rng.integers(0, 1000, num_tokens, np.int32)
    rows = rng.integers(0, 128, (num_tokens - 1, NUM_LAYERS, TOP_K), np.uint8)
    turns, start = [], 0
    for turn in range(NUM_TURNS):
        first, end = (num_tokens * part // (2 * NUM_TURNS) for part in (2 * turn + 1, 2 * turn + 2))
        generation = bus.Generation(
            request_id=f"{index}.{turn}",
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
    """What a trainer does with a step's conversations."""
    samples = []
    for turns in conversations:
        stitcher = Stitcher()
        for prompt, generation in turns:
            stitcher.add(prompt, generation)
        samples.append(stitcher.sample(advantage=1.0))
    return pack(samples, max_tokens=MAX_TOKENS)


def measure_conversations(count: int, num_tokens: int, rounds: int) -> dict[str, object]:
    """Seconds for `count` conversations of `num_tokens` each."""
    conversations = [make_conversation(index, num_tokens) for index in range(count)]
    seconds = []
    for _ in range(rounds):
        taken, batches = timed(lambda: stitch_and_pack(conversations))
        seconds.append(taken)
        num_batches = len(batches)
        del batches
    megabytes = count * (num_tokens - 1) * NUM_LAYERS * TOP_K / MEGABYTE
    return {
        "samples": count,
        "tokens": num_tokens,
        "rows_mb": megabytes,
        "batches": num_batches,
        "best_s": min(seconds),
        "median_s": statistics.median(seconds),
        "best_mb_per_s": megabytes / min(seconds),
    }


def show(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def show_way(result: dict[str, object]) -> None:
    """One line of the first table."""
    show(
        "{way:<26} {messages:>6,} messages {wire_mb:>6.1f} MB, ms: best {best_ms:>7.1f}  median {median_ms:>7.1f},"
        " peak {peak_mb:>6.1f} MB, tensors {tensors_mb:>5.1f}".format_map(result)
    )


def show_conversations(result: dict[str, object]) -> None:
    """One line of the second table."""
    show(
        "{samples:>6,} samples of {tokens:>6,} tokens {rows_mb:>7.1f} MB of rows, s: best {best_s:>6.3f}"
        "  median {median_s:>6.3f}, {best_mb_per_s:>6,.0f} MB/s".format_map(result)
    )


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.trainer", description="From the wire to tensors.")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[4096, 31_744])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--sample-tokens", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(arguments)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"numpy {np.__version__}, torch {torch.__version__} with {torch.get_num_threads()} threads"
    )
    command = " ".join(["python -m bench.trainer", *(sys.argv[1:] if arguments is None else arguments)])
    show(command)
    show(machine)
    ways: list[dict[str, object]] = []
    for num_prompt in args.prompt_tokens:
        show(f"{args.tokens:,} tokens, {args.tokens - num_prompt:,} of them sampled, best and median of {args.rounds}:")
        found = measure_ways(args.tokens, num_prompt, args.rounds)
        for result in found:
            show_way(result)
        ways += found
    conversations: list[dict[str, object]] = []
    for num_tokens in args.sample_tokens:
        conversations.append(measure_conversations(args.samples, num_tokens, args.rounds))
        show_conversations(conversations[-1])
    if args.json is not None:
        report = {"command": command, "machine": machine, "ways": ways, "conversations": conversations}
        args.json.write_text(f"{json.dumps(report, indent=1)}\n")


if __name__ == "__main__":
    main()
