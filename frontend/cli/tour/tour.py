"""The tour: creates its models, starts its fleet and runs its steps in order."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from .... import bus
from ....schemas.presence import RoutedExpertsInfo
from ...tokenization import Tokenizer, load_tokenizer
from ..console import print_json, program, waiting, write
from ..exits import CommandFailed, ExitCode
from ..fleet_display import FleetObserver
from ..local_fleet import TINY_MOE, LocalFleet, make_tiny_moe, run_fleet
from ..prompts import PromptLine
from ..restarts import RestartRule
from .control import FIRST_VERSION, flush_cache, kill_worker, pause_and_resume, update_weights
from .guide import Guide, took
from .requests import complete_all, stream_one

__all__ = ["Tour"]

NUM_STEPS: Final = 8
NEXT_SEED: Final = 1
"""Seed of the weights that replace the first weights, whose seed is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tour:
    """One run of the demo. `run` raises `CommandFailed` if a check fails."""

    prompts: Sequence[PromptLine]
    source: Path
    fleet: str
    state_dir: Path
    as_json: bool
    is_verbose: bool

    @property
    def _out(self) -> IO[str]:
        return sys.stderr if self.as_json else sys.stdout

    def _write(self, text: str = "", *, end: str = "\n") -> None:
        write(text, end=end, out=self._out)

    def _begin(self, step: int) -> None:
        """Begin the line of a step. The next output is its title."""
        self._write(f"\n[{step}/{NUM_STEPS}] ", end="")

    async def run(self) -> int:
        """Run the tour."""
        self._write("rollbus: real questions to a real vLLM engine, over NATS, on this machine.")
        self._write("The model is tiny and untrained, so its text is noise. All other results are real.")
        started = time.monotonic()
        self._begin(1)
        self._write("A tiny mixture-of-experts model with random weights, and a second set of weights for later")
        with waiting("creating the models"):
            model = await make_tiny_moe(self.state_dir)
            next_weights = await make_tiny_moe(self.state_dir, seed=NEXT_SEED)
        for folder in (model, next_weights):
            self._write(f"      {folder}")
        self._write(f"      ({took(started)})")

        started = time.monotonic()
        self._begin(2)
        self._write("A NATS server and one vLLM worker; a cold start takes about ten seconds")
        flags = ("--served-model-name", TINY_MOE, "--weight-version", str(FIRST_VERSION))
        roots = ("--weight-root", str(self.state_dir))
        local = LocalFleet(
            fleet=self.fleet,
            model=model,
            served_model=TINY_MOE,
            worker_flags=(*flags, *roots),
            restarts=RestartRule(),
        )
        async with AsyncExitStack() as stack:
            with waiting("starting"):
                server = await stack.enter_async_context(run_fleet(local, FleetObserver(shows_logs=self.is_verbose)))
                tokenizer = await asyncio.to_thread(load_tokenizer, model)
            self._write(f"      {server.url} ({took(started)})")
            await self.show(server, tokenizer, next_weights)
        if not self.as_json:
            self._write(NEXT.format(program=program(), questions=_short_path(self.source), folder=self.state_dir))
        return ExitCode.OK

    async def show(self, server: str | bus.Server, tokenizer: Tokenizer, next_weights: Path) -> None:
        """Show the fleet at `server`, whose worker has weight version 1: answers, routed experts, and commands."""
        async with bus.connect(server, fleet=self.fleet) as rb:
            workers = (await rb.fleet.state()).workers
            known = workers[0].capabilities if workers else None
            if known is None or known.routed_experts is None:
                raise CommandFailed("no worker returns routed experts")
            self._write(f"      vLLM {known.engine_version}, {_described(known.routed_experts)}")
            guide = Guide(
                rb=rb,
                tokenizer=tokenizer,
                prompts=self.prompts,
                routing=known.routed_experts,
                max_model_len=known.max_model_len,
                write=self._write,
                shows_progress=not self.as_json,
            )
            self._begin(3)
            await stream_one(guide)
            self._begin(4)
            await complete_all(guide, self.source, self._out)
            self._begin(5)
            await pause_and_resume(guide)
            self._begin(6)
            await update_weights(guide, next_weights)
            self._begin(7)
            await flush_cache(guide)
            self._begin(8)
            await kill_worker(guide)
        if self.as_json:
            print_json(guide.report)


NEXT = """
What to try next
  {program} up --weight-root {folder}
      the same fleet, until Ctrl-C; with --model DIR your own checkpoint
  {program} status
      from another terminal: the workers, their load, and the desired state
  {program} update-weights {folder}/tiny-moe-1 --version 1
      the update that you have just seen, by hand; also pause, resume, flush-cache
  {program} generate --input {questions} --output answers.jsonl --routed-experts npz
      results in a file, their routed experts in answers.npz
  README.md
      the same from Python, in ten lines
"""


def _described(routing: RoutedExpertsInfo) -> str:
    return f"{routing.num_layers} layers of {routing.num_experts} experts, {routing.top_k} for each token"


def _short_path(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
