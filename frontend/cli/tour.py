"""What `rollbus demo` shows, step by step."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from msgspec.structs import replace

import bus
from bus import GenerateRequest, Generation
from frontend.cli.console import note, print_json, print_table, program, progress, say, waiting
from frontend.cli.exits import CommandFailed, ExitCode
from frontend.cli.expert_counts import COLUMNS, count_experts, expert_rows
from frontend.cli.local_fleet import TINY_MOE, LocalFleet, make_tiny_moe, run_fleet
from frontend.cli.prompts import Prompt
from frontend.cli.results import first_error
from frontend.tokenization import Tokenizer, load_tokenizer
from schemas.presence import RoutedExpertsInfo
from schemas.rows import expected_rows

__all__ = ["Tour"]

NUM_STREAMED = 16
"""Tokens of the streamed answer; each is a line."""
NUM_SHOWN_CHARS = 60
"""Of a question that is quoted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tour:
    """One run of the demo; `run` raises `CommandFailed` where reality is not as told."""

    prompts: Sequence[Prompt]
    source: Path
    fleet: str
    state_dir: Path
    as_json: bool
    is_verbose: bool

    @property
    def _out(self) -> IO[str]:
        return sys.stderr if self.as_json else sys.stdout

    def _say(self, text: str = "", *, end: str = "\n") -> None:
        say(text, end=end, out=self._out)

    async def run(self) -> int:
        """Give the tour."""
        self._say("rollbus: real questions through a real vLLM engine, over NATS, on this machine.")
        self._say("The model is tiny and untrained: its text is noise. Ids, logprobs and routing are the engine's.")
        started = time.monotonic()
        self._say("\n[1/4] A tiny mixture-of-experts model with random weights")
        with waiting("making it"):
            model = await make_tiny_moe(self.state_dir)
        self._say(f"      {model} ({_took(started)})")

        started = time.monotonic()
        self._say("\n[2/4] A NATS server and one vLLM worker; a cold start takes about half a minute")
        local = LocalFleet(fleet=self.fleet, model=model, worker_flags=("--served-model-name", TINY_MOE))
        async with AsyncExitStack() as stack:
            with waiting("starting"):
                url = await stack.enter_async_context(run_fleet(local, self._hear))
                tokenizer = await asyncio.to_thread(load_tokenizer, model)
            self._say(f"      {url} ({_took(started)})")
            await self.show(url, tokenizer)
        if not self.as_json:
            self._say(NEXT.format(program=program(), questions=_short_path(self.source)))
        return ExitCode.OK

    async def show(self, url: str, tokenizer: Tokenizer) -> None:
        """Stream one answer, complete all prompts, and show their routing, on the fleet at `url`."""
        async with bus.connect(url, fleet=self.fleet) as rb:
            workers = (await rb.fleet.state()).workers
            known = workers[0].capabilities if workers else None
            if known is None or known.routed_experts is None:
                raise CommandFailed("no worker returns routed experts")
            self._say(f"      vLLM {known.engine_version}, {_described(known.routed_experts)}")
            await self._stream_one(rb, tokenizer)
            generations, seconds = await self._complete_all(rb, tokenizer)
        self._summarize(generations, known.routed_experts, seconds)

    def _hear(self, worker: str, line: str) -> None:
        if self.is_verbose:
            note(f"[{worker}] {line}")

    async def _stream_one(self, rb: bus.Client, tokenizer: Tokenizer) -> None:
        """Print the tokens of one answer as they arrive."""
        prompt = next((prompt for prompt in self.prompts if prompt.text is not None), self.prompts[0])
        request = _shortened(prompt.request(tokenizer))
        self._say(f"\n[3/4] One question, streamed: {_quoted(prompt)}")
        self._say(f"      {request.prompt_len} prompt tokens; each line is one step of the engine, printed as it comes")
        self._say(f"      {'token id':>8}  {'text':<14}{'logprob':>9}  experts behind it (layer 0)")
        async for chunk in rb.generate(request):
            if not chunk.num_tokens:
                continue
            logprobs = chunk.logprobs
            if logprobs is None or chunk.routed_experts is None:
                raise CommandFailed("a chunk came without its logprobs or routed experts")
            # The last rows are those of the positions that gave these tokens; the prompt's come before them.
            rows = chunk.routed_experts.numpy()[-chunk.num_tokens :]
            for token_id, logprob, row in zip(chunk.token_ids.tolist(), logprobs.tolist(), rows, strict=True):
                experts = " ".join(f"{expert:>2}" for expert in sorted(row[0].tolist()))
                self._say(f"      {token_id:>8}  {tokenizer.decode([token_id])!r:<14}{logprob:>9.3f}  {experts}")

    async def _complete_all(self, rb: bus.Client, tokenizer: Tokenizer) -> tuple[list[Generation], float]:
        """Complete all prompts at once; every result must be whole."""
        self._say(f"\n[4/4] All {len(self.prompts)} questions of {self.source.name} at once")
        requests = [prompt.request(tokenizer) for prompt in self.prompts]
        generations = []
        started = time.monotonic()
        with progress("      generating", len(requests), shown=not self.as_json) as advance:
            async for generation in rb.complete_many(requests):
                error = first_error(generation)
                if error is not None:
                    raise CommandFailed(f"a request failed: {error}")
                generations += [generation, *generation.siblings]
                advance()
        seconds = time.monotonic() - started
        for generation in generations:
            _check_rows(generation)
        return generations, seconds

    def _summarize(self, generations: Sequence[Generation], routing: RoutedExpertsInfo, seconds: float) -> None:
        arrays = [generation.routed_experts for generation in generations if generation.routed_experts is not None]
        counts = count_experts(arrays, routing.num_layers, routing.num_experts)
        num_tokens = sum(len(generation.token_ids) for generation in generations)
        num_rows, num_bytes = sum(len(array) for array in arrays), sum(array.nbytes for array in arrays)
        if self.as_json:
            print_json(
                {
                    "prompts": len(self.prompts),
                    "tokens": num_tokens,
                    "seconds": round(seconds, 3),
                    "tokens_per_s": round(num_tokens / seconds, 1),
                    "routed_experts": {"rows": num_rows, "bytes": num_bytes, "counts": counts.tolist()},
                }
            )
            return
        longest = max(generations, key=lambda generation: len(generation.token_ids))
        rows = longest.routed_experts if longest.routed_experts is not None else arrays[0]
        self._say(f"      {num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s on this machine")
        self._say("\nRouting: which experts every token went through")
        self._say(
            f"  one answer: array of shape {rows.shape} (rows, layers, top k), dtype {rows.dtype}, {rows.nbytes} bytes"
        )
        self._say(
            f"              {len(rows)} rows = {longest.prompt_len} prompt + {len(longest.token_ids)} generated "
            "tokens - 1: the last token was not fed back"
        )
        self._say(f"  all {len(arrays)}:     {num_rows} rows, {num_bytes} bytes; every answer has all of its rows")
        self._say(
            f"  an even share would be {1 / routing.num_experts:.0%} for each of {routing.num_experts} experts:\n"
        )
        print_table(COLUMNS, expert_rows(counts), out=self._out)


NEXT = """
What to try next
  {program} up
      the same fleet, until Ctrl-C; with --model DIR your own checkpoint
  {program} status
      from another terminal: the workers and how busy they are
  {program} generate --input {questions} --output answers.jsonl --routed-experts npz
      results in a file, their routing beside it in answers.npz
  README.md
      the same from Python, in ten lines
"""


def _check_rows(generation: Generation) -> None:
    expected = expected_rows(generation.prompt_len, generation.start, len(generation.token_ids))
    found = None if generation.routed_experts is None else len(generation.routed_experts)
    if found != expected:
        raise CommandFailed(f"{generation.request_id} has {found} routing rows, not {expected}")


def _shortened(request: GenerateRequest) -> GenerateRequest:
    return replace(request, sampling=replace(request.sampling, max_tokens=NUM_STREAMED, n=1))


def _described(routing: RoutedExpertsInfo) -> str:
    return f"{routing.num_layers} layers of {routing.num_experts} experts, {routing.top_k} for each token"


def _quoted(prompt: Prompt) -> str:
    if prompt.text is None:
        return "(given as token ids)"
    return f"“{prompt.text if len(prompt.text) <= NUM_SHOWN_CHARS else prompt.text[: NUM_SHOWN_CHARS - 1] + '…'}”"


def _short_path(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _took(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"
