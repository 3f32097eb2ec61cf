"""Steps of the tour with commands: pause and resume, new weights during an answer, a flush, and a killed worker."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from .... import bus
from ....bus import GenerateRequest, Generation
from ....bus.client.client import registry_of
from ..console import waiting
from ..exits import CommandFailed
from ..results import first_error
from .guide import Guide, quoted, require, took
from .requests import check_rows

__all__ = ["FIRST_VERSION", "flush_cache", "kill_worker", "pause_and_resume", "update_weights"]

FIRST_VERSION = 1
"""Version of the weights with which the worker starts."""
NEXT_VERSION = 2
"""Version of the weights that replace them."""
NUM_PAUSED = 8
"""Maximum number of requests that are sent to a paused worker."""
SEEN_WITHIN_S = 30.0
"""Seconds for the requests to appear in the queue. A machine that is not overloaded needs half a second."""
POLL_S = 0.01
"""Seconds between two looks at the number of received tokens."""
MAX_POLLS = 6000
"""A minute: enough for the first tokens on a busy machine."""
NUM_SHOWN = 4
"""Number of tokens that are printed at the beginning of the answer, and before and after the change of weights."""
NUM_COMPARED = 6
"""Number of tokens of the answers before and after the update."""
KILLED_TOKENS = 256
"""Token limit of the answers during which the worker is killed: a second of work or more."""
MAX_TOKENS = 8192
"""Token limit of the answer during which the weights change. The tour ends it as soon as it has both versions."""


async def pause_and_resume(guide: Guide) -> None:
    """Send requests to a paused fleet. They wait in the queue, and the fleet answers them after the resume."""
    guide.write("Pause and resume")
    prompts = guide.prompts[:NUM_PAUSED]
    requests = [guide.request(prompt, max_tokens=16) for prompt in prompts]
    guide.write_result(await guide.rb.fleet.pause())
    async with asyncio.TaskGroup() as tasks:
        answers = tasks.create_task(_complete(guide.rb, requests), name="requests of the paused fleet")
        await _until_waiting(guide.rb, len(requests))
        require(not answers.done(), "a paused worker answered a request")
        guide.write(f"      {len(requests)} requests sent meanwhile: all of them wait in the queue")
        started = time.monotonic()
        guide.write_result(await guide.rb.fleet.resume())
    num_tokens = sum(len(generation.token_ids) for generation in answers.result())
    guide.write(f"      all {len(requests)} are answered: {num_tokens} tokens, {took(started)} after the resume")
    guide.report["pause"] = {"waited": len(requests), "tokens": num_tokens}


async def _complete(rb: bus.Client, requests: Sequence[GenerateRequest]) -> list[Generation]:
    generations = [generation async for generation in rb.complete_many(requests)]
    for generation in generations:
        error = first_error(generation)
        if error is not None:
            raise CommandFailed(f"a request failed: {error}")
    return generations


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


async def update_weights(guide: Guide, checkpoint: Path) -> None:
    """Replace the weights during an answer, and compare an answer from before with one from after the update."""
    question = guide.request(guide.first_question, max_tokens=NUM_COMPARED, temperature=0.0, ignore_eos=True)
    guide.write("New weights during an answer")
    answers = [await guide.rb.complete(question)]
    await _stream_across(guide, checkpoint)
    answers.append(await guide.rb.complete(question))
    guide.write(f"      {quoted(guide.first_question)}, with temperature 0, before and after:")
    for generation, version in zip(answers, (FIRST_VERSION, NEXT_VERSION), strict=True):
        require(set(generation.weight_versions.tolist()) == {version}, f"an answer is not of version {version}")
        guide.write(f"        version {version}: {guide.tokenizer.decode(generation.token_ids.tolist())!r}")


async def flush_cache(guide: Guide) -> None:
    """Send a long prompt until it is in the prefix cache, then flush the cache."""
    guide.write("Flush the prefix cache")
    token_ids = [token_id for prompt in guide.prompts for token_id in guide.request(prompt).prompt_token_ids]
    request = GenerateRequest(
        prompt_token_ids=token_ids[: guide.max_model_len - 1], sampling=bus.SamplingParams(max_tokens=1)
    )
    await guide.rb.complete(request)
    cached = await _cached_tokens(guide, request)
    guide.write(f"      a prompt of {request.prompt_len} tokens, sent again: {cached} tokens are in the cache")
    guide.write_result(await guide.rb.fleet.flush_cache())
    left = await _cached_tokens(guide, request)
    guide.write(f"      sent after the flush: {left} tokens are in the cache")
    require(left == 0, "the flushed cache is not empty")
    guide.report["flush"] = {"cached_before": cached, "cached_after": left}


async def kill_worker(guide: Guide) -> None:
    """Kill the only worker while it answers. Its next process continues the answers, and none lacks a token."""
    guide.write("A worker is killed while it answers")
    room = min(KILLED_TOKENS, *(guide.max_model_len - guide.request(prompt).prompt_len for prompt in guide.prompts))
    requests = [
        guide.request(prompt, max_tokens=room, temperature=0.0, ignore_eos=True)
        for prompt in guide.prompts[:NUM_PAUSED]
    ]
    undisturbed = {generation.request_id: generation for generation in await _complete(guide.rb, requests)}
    (worker,) = (await guide.rb.fleet.state()).workers
    if worker.pid is None:
        raise CommandFailed(f"worker {worker.worker} reports no process id")
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(_complete(guide.rb, requests), name="requests of the killed worker")
        registry = registry_of(guide.rb)
        for _ in range(MAX_POLLS):
            if registry.num_tokens >= NUM_SHOWN * len(requests) or answering.done():
                break
            await asyncio.sleep(POLL_S)
        received = registry.num_tokens
        os.kill(worker.pid, signal.SIGKILL)
        started = time.monotonic()
        guide.write(f"      kill -9 {worker.pid}: worker {worker.worker} is dead, after {received} tokens")
        with waiting("its next process starts"):
            generations = await answering
    moved = sum(generation.attempts > 1 for generation in generations)
    require(moved > 0, "no request was in flight when the worker was killed")
    for generation in generations:
        require(len(generation.token_ids) == room, f"request {generation.request_id} lacks tokens")
        check_rows(generation)
    equal = sum(
        generation.token_ids.tolist() == undisturbed[generation.request_id].token_ids.tolist()
        for generation in generations
    )
    guide.write(f"      {moved} requests moved to its next process, and ended {took(started)} after the kill")
    guide.write(
        f"      all {len(generations)} answers are whole: {room * len(generations)} tokens and their routed experts; "
        f"{equal} of {len(generations)} equal those of a run without a kill"
    )
    guide.report["kill"] = {"worker": worker.worker, "moved": moved, "whole": len(generations), "equal": equal}


async def _cached_tokens(guide: Guide, request: GenerateRequest) -> int:
    return (await guide.rb.complete(request)).cached_tokens or 0


async def _stream_across(guide: Guide, checkpoint: Path) -> None:
    """Stream an answer and update the weights meanwhile. End the answer when it has tokens of both versions."""
    request = guide.request(guide.first_question, ignore_eos=True)
    room = min(MAX_TOKENS, guide.max_model_len - request.prompt_len)
    request = guide.request(guide.first_question, ignore_eos=True, max_tokens=room)
    guide.write(f"      {'token id':>8}  {'text':<14}{'version':>7}")
    cut = Cut(guide.write)
    async with asyncio.TaskGroup() as tasks, contextlib.aclosing(guide.rb.generate(request)) as chunks:
        update: asyncio.Task[bus.CommandResult] | None = None
        async for chunk in chunks:
            for token_id in chunk.token_ids.tolist():
                text = f"      {token_id:>8}  {guide.tokenizer.decode([token_id])!r:<14}{chunk.weight_version:>7}"
                cut.add(chunk.weight_version, text)
            if update is None and cut.counts[FIRST_VERSION] >= NUM_SHOWN:
                update = tasks.create_task(guide.rb.fleet.update_weights(str(checkpoint), version=NEXT_VERSION))
            if cut.counts[NEXT_VERSION] >= NUM_SHOWN:
                break
        require(update is not None and cut.counts[NEXT_VERSION] > 0, "the answer ended before the weights changed")
    if update is not None:
        guide.write_result(update.result())
    guide.report["update"] = {"tokens": {str(version): count for version, count in cut.counts.items() if count}}


class Cut:
    """Prints the first tokens of an answer, and the tokens before and after its change of weights.

    Args:
        write: prints a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self.counts: Counter[int] = Counter()
        """Number of tokens by weight version."""
        self._write = write
        self._held_back: deque[str] = deque(maxlen=NUM_SHOWN)

    def add(self, version: int, line: str) -> None:
        """Add the line of the next token.

        Raises:
            CommandFailed: its weight version is unexpected, or older than that of the previous token.
        """
        require(version in (FIRST_VERSION, NEXT_VERSION), f"a token has the unexpected weight version {version}")
        self.counts[version] += 1
        count = self.counts[version]
        if version == FIRST_VERSION:
            require(not self.counts[NEXT_VERSION], "a token of the old weights follows a token of the new weights")
        elif count == 1:
            self._write_cut()
        if count <= NUM_SHOWN:
            self._write(line)
        elif version == FIRST_VERSION:
            self._held_back.append(line)

    def _write_cut(self) -> None:
        """Print the remaining tokens of the old weights."""
        skipped = self.counts[FIRST_VERSION] - NUM_SHOWN - len(self._held_back)
        if skipped > 0:
            self._write(f"           ... {skipped} more ...")
        for line in self._held_back:
            self._write(line)
