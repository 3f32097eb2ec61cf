"""The tour of `rollbus demo`: creates its models, starts its fleet and runs its steps in order.

The first steps have requests: one answer token by token, then many at once with their routed experts. Then come
commands: pause and resume, new weights during an answer, a flush, and a killed worker.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from ... import bus
from ...bus import GenerateRequest
from ...schemas.options import check_writable
from ...schemas.presence import Capabilities, RoutedExpertsInfo
from ..tokenization import Tokenizer, load_fast_tokenizer
from .console import print_json, program, progress, waiting, write
from .control import summary
from .exits import CommandFailed, ExitCode, WrongUsage
from .generate.inputs import open_input
from .generate.rows import Defaults, PromptLine, read_prompts
from .local.display import FleetObserver
from .local.fleet import TINY_MOE, LocalFleet, check_vllm, default_state_dir, make_tiny_moe, run_fleet
from .local.processes import RestartRule
from .options import EXAMPLES_DIR, refuse_options
from .prove.probe import check_rows, complete_all, kill_worker, require
from .watch.experts import LEGEND, map_lines

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


NUM_SHOWN_CHARS = 60
"""Maximum number of characters of a quoted question."""


NUM_STREAMED = 16
"""Number of tokens of the streamed answer. Each token is a line."""
MAP_WIDTH = 74
"""Columns of the map of experts. With its margin it fits a terminal of 80 columns."""
FIRST_VERSION = 1
"""Version of the weights with which the worker starts."""
NEXT_VERSION = 2
"""Version of the weights that replace them."""
NUM_PAUSED = 8
"""Maximum number of requests that are sent to a paused worker."""
SEEN_WITHIN_S = 30.0
"""Seconds for the requests to appear in the queue. A machine that is not overloaded needs half a second."""
NUM_SHOWN = 4
"""Number of tokens that are printed at the beginning of the answer, and before and after the change of weights."""
NUM_COMPARED = 6
"""Number of tokens of the answers before and after the update."""
KILLED_TOKENS = 256
"""Token limit of the answers during which the worker is killed: a second of work or more."""
MAX_TOKENS = 8192
"""Token limit of the answer during which the weights change. The tour ends it as soon as it has both versions."""
KV_CACHE = '{"kv_cache_memory_bytes": 134217728}'
"""Engine argument. On a CPU, an engine fills its KV cache when it starts: 1 GiB, the default, in up to two seconds."""
NUM_STEPS: Final = 8
NEXT_SEED: Final = 1
"""Seed of the weights that replace the first weights, whose seed is 0."""


@dataclass(slots=True, kw_only=True)
class Tour:
    """One run of the demo. `run` raises `CommandFailed` if a check fails."""

    prompts: Sequence[PromptLine]
    source: Path
    fleet: str
    state_dir: Path
    as_json: bool
    is_verbose: bool
    report: dict[str, Any] = field(default_factory=dict)
    """Results of the steps, for --json."""
    rb: bus.Client = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    engine: Capabilities = field(init=False)
    """Engine of the only worker."""

    def _write(self, text: str = "", *, end: str = "\n") -> None:
        write(text, end=end, out=sys.stderr if self.as_json else sys.stdout)

    def _begin(self, step: int) -> None:
        """Begin the line of a step. The next output is its title."""
        self._write(f"\n[{step}/{NUM_STEPS}] ", end="")

    @property
    def _first_question(self) -> PromptLine:
        """First prompt with text, or the first prompt if none has text."""
        return next((prompt for prompt in self.prompts if prompt.text is not None), self.prompts[0])

    def _load_tokenizer(self, model: Path) -> Tokenizer:
        """Load the tokenizer and all that chat templates import."""
        tokenizer = load_fast_tokenizer(model)
        if isinstance(tokenizer, str):
            raise CommandFailed(f"no tokenizer in {model}: {tokenizer}")
        self._first_question.request(tokenizer)
        return tokenizer

    def _request(self, prompt: PromptLine, **sampling: Any) -> GenerateRequest:
        """Return a request for one sample of `prompt`, with changed sampling parameters."""
        request = prompt.request(self.tokenizer)
        return replace(request, sampling=replace(request.sampling, n=1, **sampling))

    def _write_result(self, result: bus.CommandResult) -> None:
        """Write the result of a command as the command line does."""
        self._write(f"      {summary(result)}")

    async def run(self) -> int:
        """Run the tour."""
        self._write("rollbus: real questions to a real vLLM engine, over NATS, on this machine.")
        self._write("The model is tiny and untrained, so its text is noise. All other results are real.")
        started = time.monotonic()
        self._begin(1)
        self._write("A tiny mixture-of-experts model with random weights, and a second set of weights for later")
        with waiting("creating the models"):
            async with asyncio.TaskGroup() as tasks:
                making = [tasks.create_task(make_tiny_moe(self.state_dir, seed=seed)) for seed in (0, NEXT_SEED)]
            model, next_weights = (task.result() for task in making)
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
            worker_flags=(*flags, *roots, "--engine-args", KV_CACHE),
            # The tour itself kills the worker, so the cause does not last.
            restarts=RestartRule(first_delay_s=0.0),
        )
        async with AsyncExitStack() as stack:
            with waiting("starting"):
                loading = asyncio.get_running_loop().run_in_executor(None, self._load_tokenizer, model)
                server = await stack.enter_async_context(run_fleet(local, FleetObserver(shows_logs=self.is_verbose)))
                tokenizer = await loading
            self._write(f"      {server.url} ({took(started)})")
            await self.show(server, tokenizer, next_weights)
        if not self.as_json:
            self._write(NEXT.format(program=program(), questions=_short_path(self.source), folder=self.state_dir))
        return ExitCode.OK

    async def show(self, server: str | bus.Server, tokenizer: Tokenizer, next_weights: Path) -> None:
        """Show the fleet at `server`, whose worker has weight version 1: answers, routed experts, and commands."""
        async with bus.connect(server, fleet=self.fleet) as rb:
            workers = (await rb.fleet.state()).workers
            engine = workers[0].capabilities if workers else None
            if engine is None or engine.routed_experts is None:
                raise CommandFailed("no worker returns routed experts")
            routing = engine.routed_experts
            self._write(
                f"      vLLM {engine.engine_version}, {routing.num_layers} layers of {routing.num_experts} experts, "
                f"{routing.top_k} for each token"
            )
            self.rb, self.tokenizer, self.engine = rb, tokenizer, engine
            steps: tuple[Callable[[], Coroutine[object, object, None]], ...] = (
                self._stream_one,
                partial(self._complete_all, routing),
                self._pause_and_resume,
                partial(self._update_weights, next_weights),
                self._flush_cache,
                self._kill_worker,
            )
            for number, step in enumerate(steps, NUM_STEPS + 1 - len(steps)):
                self._begin(number)
                await step()
        if self.as_json:
            print_json(self.report)

    async def _stream_one(self) -> None:
        """Print the tokens of one answer as they arrive."""
        prompt = self._first_question
        request = self._request(prompt, max_tokens=NUM_STREAMED)
        self._write(f"One question, streamed: {quoted(prompt)}")
        self._write(
            f"      {request.prompt_len} prompt tokens; each line is one step of the engine, printed as it arrives"
        )
        self._write(f"      {'token id':>8}  {'text':<14}{'logprob':>9}  its experts (layer 0)")
        async for chunk in self.rb.generate(request):
            if not chunk.num_tokens:
                continue
            logprobs = chunk.logprobs
            if logprobs is None or chunk.routed_experts is None:
                raise CommandFailed("a chunk has no logprobs or no routed experts")
            # The last rows belong to the positions that generated these tokens. The rows of the prompt precede them.
            rows = chunk.routed_experts.numpy()[-chunk.num_tokens :]
            for token_id, logprob, row in zip(chunk.token_ids.tolist(), logprobs.tolist(), rows, strict=True):
                experts = " ".join(f"{expert:>2}" for expert in sorted(row[0].tolist()))
                self._write(f"      {token_id:>8}  {self.tokenizer.decode([token_id])!r:<14}{logprob:>9.3f}  {experts}")

    async def _complete_all(self, routing: RoutedExpertsInfo) -> None:
        """Complete all prompts at once and check that each result is complete. Print their routed experts."""
        self._write(f"All {len(self.prompts)} questions of {self.source.name} at once")
        requests = [prompt.request(self.tokenizer) for prompt in self.prompts]
        started = time.monotonic()
        with progress("      generating", len(requests), shown=not self.as_json) as advance:
            generations = await complete_all(self.rb, requests, advance)
        seconds = time.monotonic() - started
        arrays = [check_rows(generation) for generation in generations]
        rows = np.concatenate(arrays)
        counts = np.stack([np.bincount(of.ravel(), minlength=routing.num_experts) for of in rows.swapaxes(0, 1)])
        num_tokens = sum(len(generation.token_ids) for generation in generations)
        self.report.update(
            prompts=len(self.prompts),
            tokens=num_tokens,
            seconds=round(seconds, 3),
            tokens_per_s=round(num_tokens / seconds, 1),
            routed_experts={"rows": len(rows), "bytes": rows.nbytes, "counts": counts.tolist()},
        )
        longest = max(generations, key=lambda generation: len(generation.token_ids))
        own = check_rows(longest)
        shape = f"array of shape {own.shape} (rows, layers, top k), dtype {own.dtype}, {own.nbytes} bytes"
        parts = f"{len(own)} rows = {longest.prompt_len} prompt + {len(longest.token_ids)} generated tokens - 1"
        for line in (
            f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s on this machine",
            f"Routed experts of one answer: {shape}",
            f"  {parts}: the last token is not an input of the model",
            f"All {len(arrays)} answers: {len(rows)} rows, {rows.nbytes} bytes; no row is missing",
            "",
            *map_lines(counts, routing.top_k, MAP_WIDTH),
            LEGEND,
        ):
            self._write(f"      {line}".rstrip())

    async def _pause_and_resume(self) -> None:
        """Send requests to a paused fleet. They wait in the queue, and the fleet answers them after the resume."""
        self._write("Pause and resume")
        prompts = self.prompts[:NUM_PAUSED]
        requests = [self._request(prompt, max_tokens=16) for prompt in prompts]
        self._write_result(await self.rb.fleet.pause())
        async with asyncio.TaskGroup() as tasks:
            answers = tasks.create_task(complete_all(self.rb, requests), name="requests of the paused fleet")
            await _until_waiting(self.rb, len(requests))
            require(not answers.done(), "a paused worker answered a request")
            self._write(f"      {len(requests)} requests sent meanwhile: all of them wait in the queue")
            started = time.monotonic()
            self._write_result(await self.rb.fleet.resume())
        num_tokens = sum(len(generation.token_ids) for generation in answers.result())
        self._write(f"      all {len(requests)} are answered: {num_tokens} tokens, {took(started)} after the resume")
        self.report["pause"] = {"waited": len(requests), "tokens": num_tokens}

    async def _update_weights(self, checkpoint: Path) -> None:
        """Replace the weights during an answer, and compare an answer from before with one from after the update."""
        question = self._request(self._first_question, max_tokens=NUM_COMPARED, temperature=0.0, ignore_eos=True)
        self._write("New weights during an answer")
        answers = [await self.rb.complete(question)]
        await self._stream_across(checkpoint)
        answers.append(await self.rb.complete(question))
        self._write(f"      {quoted(self._first_question)}, with temperature 0, before and after:")
        for generation, version in zip(answers, (FIRST_VERSION, NEXT_VERSION), strict=True):
            require(set(generation.weight_versions.tolist()) == {version}, f"an answer is not of version {version}")
            self._write(f"        version {version}: {self.tokenizer.decode(generation.token_ids.tolist())!r}")

    async def _stream_across(self, checkpoint: Path) -> None:
        """Stream an answer and update the weights meanwhile. End the answer when it has tokens of both versions."""
        request = self._request(self._first_question, ignore_eos=True)
        room = min(MAX_TOKENS, self.engine.max_model_len - request.prompt_len)
        request = self._request(self._first_question, ignore_eos=True, max_tokens=room)
        self._write(f"      {'token id':>8}  {'text':<14}{'version':>7}")
        lines: dict[int, list[str]] = {FIRST_VERSION: [], NEXT_VERSION: []}
        old, new = lines.values()
        async with asyncio.TaskGroup() as tasks, contextlib.aclosing(self.rb.generate(request)) as chunks:
            update: asyncio.Task[bus.CommandResult] | None = None
            async for chunk in chunks:
                version = chunk.weight_version
                require(version in lines, f"a token has the unexpected weight version {version}")
                is_ordered = version == NEXT_VERSION or not new
                require(is_ordered, "a token of the old weights follows a token of the new weights")
                for token_id in chunk.token_ids.tolist():
                    text = f"      {token_id:>8}  {self.tokenizer.decode([token_id])!r:<14}{version:>7}"
                    if version == NEXT_VERSION and not new:
                        self._write_last(old[NUM_SHOWN:])
                    lines[version].append(text)
                    if len(lines[version]) <= NUM_SHOWN:
                        self._write(text)
                if update is None and len(old) >= NUM_SHOWN:
                    update = tasks.create_task(self.rb.fleet.update_weights(str(checkpoint), version=NEXT_VERSION))
                if len(new) >= NUM_SHOWN:
                    break
            require(update is not None and bool(new), "the answer ended before the weights changed")
        if update is not None:
            self._write_result(update.result())
        self.report["update"] = {"tokens": {str(version): len(texts) for version, texts in lines.items() if texts}}

    def _write_last(self, lines: Sequence[str]) -> None:
        """Write the last tokens of the old weights, and how many were skipped."""
        if len(lines) > NUM_SHOWN:
            self._write(f"           ... {len(lines) - NUM_SHOWN} more ...")
        for line in lines[-NUM_SHOWN:]:
            self._write(line)

    async def _flush_cache(self) -> None:
        """Send a long prompt until it is in the prefix cache, then flush the cache."""
        self._write("Flush the prefix cache")
        token_ids = [token_id for prompt in self.prompts for token_id in self._request(prompt).prompt_token_ids]
        request = GenerateRequest(
            prompt_token_ids=token_ids[: self.engine.max_model_len - 1], sampling=bus.SamplingParams(max_tokens=1)
        )
        await self.rb.complete(request)
        cached = await self._count_cached(request)
        self._write(f"      a prompt of {request.prompt_len} tokens, sent again: {cached} tokens are in the cache")
        self._write_result(await self.rb.fleet.flush_cache())
        left = await self._count_cached(request)
        self._write(f"      sent after the flush: {left} tokens are in the cache")
        require(left == 0, "the flushed cache is not empty")
        self.report["flush"] = {"cached_before": cached, "cached_after": left}

    async def _count_cached(self, request: GenerateRequest) -> int:
        return (await self.rb.complete(request)).cached_tokens or 0

    async def _kill_worker(self) -> None:
        """Kill the only worker while it answers. Its next process continues the answers, and none lacks a token."""
        self._write("A worker is killed while it answers")
        room = min(
            KILLED_TOKENS, *(self.engine.max_model_len - self._request(prompt).prompt_len for prompt in self.prompts)
        )
        requests = [
            self._request(prompt, max_tokens=room, temperature=0.0, ignore_eos=True)
            for prompt in self.prompts[:NUM_PAUSED]
        ]
        undisturbed = {generation.request_id: generation for generation in await complete_all(self.rb, requests)}
        started = time.monotonic()

        def show_kill(worker: str, pid: int, received: int) -> None:
            nonlocal started
            started = time.monotonic()
            self._write(f"      kill -9 {pid}: worker {worker} is dead, after {received} tokens")

        with waiting("its next process starts"):
            killed = await kill_worker(self.rb, requests, show_kill)
        generations = killed.generations
        moved = sum(generation.attempts > 1 for generation in generations)
        for generation in generations:
            require(len(generation.token_ids) == room, f"request {generation.request_id} lacks tokens")
            check_rows(generation)
        equal = sum(
            generation.token_ids.tolist() == undisturbed[generation.request_id].token_ids.tolist()
            for generation in generations
        )
        self._write(f"      {moved} requests moved to its next process, and ended {took(started)} after the kill")
        self._write(
            f"      all {len(generations)} answers are whole: {room * len(generations)} tokens and their routed "
            f"experts; {equal} of {len(generations)} equal those of a run without a kill"
        )
        self.report["kill"] = {"worker": killed.worker, "moved": moved, "whole": len(generations), "equal": equal}


def quoted(prompt: PromptLine) -> str:
    """Return the beginning of the prompt that fits into a line."""
    if prompt.text is None:
        return "(given as token ids)"
    return f"“{prompt.text if len(prompt.text) <= NUM_SHOWN_CHARS else prompt.text[: NUM_SHOWN_CHARS - 1] + '…'}”"


def took(started: float) -> str:
    """Return the time since `started` on `time.monotonic()` as text."""
    return f"{time.monotonic() - started:.1f} s"


async def _until_waiting(rb: bus.Client, count: int) -> None:
    """Wait until `count` requests wait in queues.

    Raises:
        CommandFailed: fewer requests wait after `SEEN_WITHIN_S`.
    """
    try:
        async with asyncio.timeout(SEEN_WITHIN_S):
            # Each call of `state` takes half a second.
            while sum(depth.waiting for depth in (await rb.fleet.state()).queues) < count:
                pass
    except TimeoutError as exc:
        raise CommandFailed(f"{count} requests were sent, but fewer wait in the queue") from exc


def _short_path(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


QUESTIONS = EXAMPLES_DIR / "questions.jsonl"


def run(args: argparse.Namespace) -> Coroutine[object, object, int]:
    """Run the tour."""
    refuse_options(args, ["nats"], "here: this command starts its own server")
    path: Path = (args.input or QUESTIONS).resolve()
    if not path.is_file():
        raise WrongUsage(f"no file {path}; name a file of questions with --input FILE")
    prompts = list(read_prompts(open_input(str(path)), Defaults(sampling={"max_tokens": args.max_tokens})))
    if not prompts:
        raise WrongUsage(f"{path} contains no prompts")
    check_vllm()
    state_dir = args.state_dir or default_state_dir()
    check_writable("--state-dir", state_dir)
    tour = Tour(
        prompts=prompts, source=path, fleet=args.fleet, state_dir=state_dir, as_json=args.json, is_verbose=args.verbose
    )
    return tour.run()
