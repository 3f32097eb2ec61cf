"""Steps of the tour with requests: one answer token by token, then many at once with their routed experts."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ....bus import Generation
from ....schemas.rows import expected_rows
from ..console import progress
from ..exits import CommandFailed
from ..expert_counts import COLUMNS, count_experts, expert_rows
from ..results import first_error
from ..tables import print_table
from .guide import Guide, quoted

__all__ = ["check_rows", "complete_all", "stream_one"]

NUM_STREAMED = 16
"""Number of tokens of the streamed answer. Each token is a line."""


async def stream_one(guide: Guide) -> None:
    """Print the tokens of one answer as they arrive."""
    prompt = guide.first_question
    request = guide.request(prompt, max_tokens=NUM_STREAMED)
    guide.write(f"One question, streamed: {quoted(prompt)}")
    guide.write(f"      {request.prompt_len} prompt tokens; each line is one step of the engine, printed as it arrives")
    guide.write(f"      {'token id':>8}  {'text':<14}{'logprob':>9}  its experts (layer 0)")
    async for chunk in guide.rb.generate(request):
        if not chunk.num_tokens:
            continue
        logprobs = chunk.logprobs
        if logprobs is None or chunk.routed_experts is None:
            raise CommandFailed("a chunk has no logprobs or no routed experts")
        # The last rows belong to the positions that generated these tokens. The rows of the prompt precede them.
        rows = chunk.routed_experts.numpy()[-chunk.num_tokens :]
        for token_id, logprob, row in zip(chunk.token_ids.tolist(), logprobs.tolist(), rows, strict=True):
            experts = " ".join(f"{expert:>2}" for expert in sorted(row[0].tolist()))
            guide.write(f"      {token_id:>8}  {guide.tokenizer.decode([token_id])!r:<14}{logprob:>9.3f}  {experts}")


async def complete_all(guide: Guide, source: Path, out: IO[str]) -> None:
    """Complete all prompts at once and check that each result is complete. Print their routed experts on `out`."""
    guide.write(f"All {len(guide.prompts)} questions of {source.name} at once")
    requests = [prompt.request(guide.tokenizer) for prompt in guide.prompts]
    generations: list[Generation] = []
    started = time.monotonic()
    with progress("      generating", len(requests), shown=guide.shows_progress) as advance:
        async for generation in guide.rb.complete_many(requests):
            error = first_error(generation)
            if error is not None:
                raise CommandFailed(f"a request failed: {error}")
            generations += [generation, *generation.siblings]
            advance()
    seconds = time.monotonic() - started
    for generation in generations:
        check_rows(generation)
    _summarize(guide, generations, seconds, out)


def _summarize(guide: Guide, generations: Sequence[Generation], seconds: float, out: IO[str]) -> None:
    routing = guide.routing
    arrays = [generation.routed_experts for generation in generations if generation.routed_experts is not None]
    counts = count_experts(arrays, routing.num_layers, routing.num_experts)
    num_tokens = sum(len(generation.token_ids) for generation in generations)
    num_rows, num_bytes = sum(len(array) for array in arrays), sum(array.nbytes for array in arrays)
    guide.report.update(
        prompts=len(guide.prompts),
        tokens=num_tokens,
        seconds=round(seconds, 3),
        tokens_per_s=round(num_tokens / seconds, 1),
        routed_experts={"rows": num_rows, "bytes": num_bytes, "counts": counts.tolist()},
    )
    longest = max(generations, key=lambda generation: len(generation.token_ids))
    rows = longest.routed_experts if longest.routed_experts is not None else arrays[0]
    guide.write(f"      {num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s on this machine")
    guide.write(
        f"      Routed experts of one answer: array of shape {rows.shape} (rows, layers, top k), dtype {rows.dtype}, "
        f"{rows.nbytes} bytes"
    )
    guide.write(
        f"        {len(rows)} rows = {longest.prompt_len} prompt + {len(longest.token_ids)} generated tokens - 1: "
        "the last token is not an input of the model"
    )
    guide.write(f"      All {len(arrays)} answers: {num_rows} rows, {num_bytes} bytes; no row is missing")
    guide.write(f"        an even share is {1 / routing.num_experts:.0%} for each of {routing.num_experts} experts:\n")
    print_table(COLUMNS, expert_rows(counts), out=out)


def check_rows(generation: Generation) -> None:
    """Check that a result has the routed experts of each position.

    Raises:
        CommandFailed: rows are missing.
    """
    expected = expected_rows(generation.prompt_len, generation.start, len(generation.token_ids))
    found = None if generation.routed_experts is None else len(generation.routed_experts)
    if found != expected:
        raise CommandFailed(f"request {generation.request_id} has {found} rows of routed experts, not {expected}")
