"""Measures what a worker needs to count its experts and to answer with the counts.

    python -m bench.experts [--tokens-per-s 5000] [--rounds 7] [--json FILE]

The bench runs only the counter. Its input is the output of an engine for 128 requests: steps with one token of each
request, and prompts of 1,024 tokens. There are as many prompt tokens as generated tokens. `counting_us` is the CPU time
for a position. `core_percent` is this time as a share of one core, at `--tokens-per-s` generated tokens and as many
prompt tokens per second. `longest_ms` is the longest time for which one step of 128 tokens blocked the worker's loop.
`read_ms` is the CPU time of the first answer of an interval. Later answers of the interval reuse it. `answer_kb` is the
size of the answer in JSON.
"""

import argparse
import time
from typing import Final

import numpy as np

from bench.report import Report, program
from rollbus.bus.protocol.telemetry.experts import ExpertBook
from rollbus.frontend.cli.tables import Spread
from rollbus.schemas.messages import encode_json
from rollbus.schemas.options import arg
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.rows import DTYPES, dtype_for

SHAPES: Final = ((48, 8, 128), (61, 8, 384))
"""Layers, experts of a token, experts: a model with 30 billion parameters, and a model with a trillion."""
REQUESTS: Final = 128
STEPS: Final = 512
PROMPT_EVERY: Final = 8
"""Steps between two prompts. A prompt has as many tokens as these steps generate."""
STEP_S: Final = 0.025


def measure(report: Report, shape: tuple[int, int, int], tokens_per_s: float, rounds: int) -> None:
    """Measure one shape."""
    num_layers, top_k, num_experts = shape
    dtype = dtype_for(num_experts)
    routing = RoutedExpertsInfo(num_layers=num_layers, top_k=top_k, num_experts=num_experts, dtype=dtype)
    random = np.random.default_rng(0)
    # Use more rows than the CPU caches hold, as with the rows of an engine.
    prompts = random.integers(0, num_experts, (16, PROMPT_EVERY * REQUESTS, *shape[:2])).astype(DTYPES[dtype])
    tokens = random.integers(0, num_experts, (128, REQUESTS, *shape[:2])).astype(DTYPES[dtype])
    each, longest, reads, size = [], [], [], 0
    for _ in range(rounds):
        book, slowest, begun = ExpertBook(routing, 0.0, 1e9), 0.0, time.process_time()
        for step in range(STEPS):
            step_begun = time.thread_time()
            book.add_computed("generated", REQUESTS, 1, step * STEP_S)
            book.add_rows("generated", tokens[step % len(tokens)], 1, step * STEP_S)
            slowest = max(slowest, time.thread_time() - step_begun)
            if step % PROMPT_EVERY == 0:
                book.add_computed("prompt", PROMPT_EVERY * REQUESTS, 1, step * STEP_S)
                book.add_rows("prompt", prompts[step % len(prompts)], 1, step * STEP_S)
            book.count_some()
        each.append((time.process_time() - begun) / (2 * STEPS * REQUESTS))
        longest.append(slowest * 1e3)
        begun = time.process_time()
        answer = book.load(0, "versions", 60.0)
        reads.append((time.process_time() - begun) * 1e3)
        size = len(encode_json(answer))
    report.add(
        model=" x ".join(map(str, shape)),
        counting_us=Spread.of([one * 1e6 for one in each]),
        core_percent=Spread.of([100 * one * 2 * tokens_per_s for one in each]),
        longest_ms=Spread.of(longest),
        read_ms=Spread.of(reads),
        answer_kb=size / 1000,
    )


def _run(args: argparse.Namespace, report: Report) -> None:
    for shape in SHAPES:
        measure(report, shape, args.tokens_per_s, args.rounds)


if __name__ == "__main__":
    program(
        "experts",
        "Measure the cost of counting experts.",
        _run,
        arg("--tokens-per-s", None, "generated tokens per second (default: %(default)s)", type=float, default=5000.0),
        rounds=7,
    )
