"""Measures the time of one placement: hash a prompt, find its prefix, and choose a worker. No I/O, one thread.

python -m bench.placement_decision [--workers 64] [--tokens 8000] [--json FILE]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rollbus.bus.protocol.queue.load import PIECE_TOKENS, PrefixScope, piece_hashes
from rollbus.bus.protocol.queue.placement import PlacementNeeds, PlacementPolicy
from rollbus.schemas.presence import EngineStats, WorkerPresence, WorkerState

VOCAB_SIZE = 150_000
NUM_DECISIONS = 200
NUM_ROUNDS = 15


def measure_decisions(num_workers: int = 64, num_tokens: int = 8_000) -> dict[str, float]:
    """Return the microseconds of one whole decision by case.

    The fastest round counts, because other programs run on the machine.
    """
    policy = _policy(num_workers)
    able = [load for i in range(num_workers) if (load := policy.loads.get(f"worker-{i}")) is not None]
    rng = np.random.default_rng(1)
    shared = rng.integers(0, VOCAB_SIZE, num_tokens, np.int32)
    turn = np.concatenate([shared[: num_tokens // 2], rng.integers(0, VOCAB_SIZE, num_tokens // 2, np.int32)])
    other = rng.integers(0, VOCAB_SIZE, num_tokens, np.int32)
    # All workers have parts of one prompt, each of a different length. One worker also has a prompt that begins with
    # the same tokens and continues differently.
    for i, load in enumerate(able):
        step = len(shared) * (i + 1) // len(able)
        policy.admitted(_wanted(shared[:step] if i % 2 else shared), load.worker, 1.0, was_placed=False)
    policy.admitted(_wanted(turn), able[-1].worker, 1.0, was_placed=False)
    policy.admitted(_wanted(other[:PIECE_TOKENS], "known"), able[0].worker, 1.0, was_placed=False)
    cases: dict[str, Callable[[], object]] = {
        "hash_us": lambda: piece_hashes(other, PrefixScope()),
        "unknown_us": lambda: policy.place(_wanted(other[1:]), able, 2.0),
        "turn_us": lambda: policy.place(_wanted(turn), able, 2.0),
        "everywhere_us": lambda: policy.place(_wanted(shared), able, 2.0),
        "session_us": lambda: policy.place(_wanted(other, "known"), able, 2.0),
        "new_session_us": lambda: policy.place(_wanted(other, "unknown"), able, 2.0),
        "group_of_8_us": lambda: policy.place_group(_wanted(other), 8, able, 2.0),
        "admission_us": lambda: policy.admitted(_wanted(turn), able[-1].worker, 2.0, was_placed=True),
    }
    return {name: _fastest_us(decide) for name, decide in cases.items()}


def _policy(num_workers: int) -> PlacementPolicy:
    policy = PlacementPolicy()
    for i in range(num_workers):
        stats = EngineStats(running=8 + i % 4, prefill_tokens_per_s=2e4, decode_tokens_per_s=1e3)
        presence = WorkerPresence(
            worker=f"worker-{i}",
            incarnation="1",
            model="m",
            state=WorkerState.SERVING,
            weight_version=1,
            in_flight=8 + i % 4,
            free_slots=120,
            uptime_s=1.0,
            lease_s=5.0,
            engine_stats=stats,
        )
        policy.update(presence, 0.0)
    return policy


def _wanted(token_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]", session_id: str | None = None) -> PlacementNeeds:
    scope = PrefixScope()
    return PlacementNeeds(len(token_ids), piece_hashes(token_ids, scope), scope, session_id=session_id)


def _fastest_us(decide: Callable[[], object]) -> float:
    rounds = []
    for _ in range(NUM_ROUNDS):
        began_at = time.perf_counter()
        for _ in range(NUM_DECISIONS):
            decide()
        rounds.append((time.perf_counter() - began_at) / NUM_DECISIONS)
    return round(min(rounds) * 1e6, 1)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement_decision", description=__doc__)
    parser.add_argument("--workers", type=int, default=64, help="workers to choose among (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8_000, help="length of a prompt (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="JSON file for the figures (default: no file)")
    args = parser.parse_args()
    figures = {"workers": args.workers, "tokens": args.tokens, **measure_decisions(args.workers, args.tokens)}
    text = json.dumps(figures, indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
