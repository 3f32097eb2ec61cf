"""The stage `updates`: new weights by each way, the cut between two versions in a stream, and the way back.

A copy of the checkpoint with a change is loaded, and then the original again. After each update, the fleet must answer
as a worker that was started with these weights, and during the first update, no stream may mix or mislabel versions.
"""

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ....bus import CommandResult, GenerateRequest, Generation, SamplingParams, WeightPublisher
from ....bus.publish.tensors import folder_tensors
from ....schemas.control import FinishWeightUpdate, UpdateWeights
from ....schemas.errors import RollbusError
from ....schemas.options import memory_bytes
from ..console import size
from .checkpoint import Copies, copy_checkpoint
from .probe import TOLD_APART, Baseline, complete_all, mean_of, renew, undisturbed
from .stage import Proof, Stage, StageRefused
from .verdicts import Finding, Number, Outcome, Verdict, limited, measured

NUM_NEW: Final = 16
"""Tokens of the new weights after which a stream is left: enough to see that they differ from those of the old."""
MAX_STREAMED: Final = 1024
"""Tokens of a stream across an update. Until the update ends, each ended stream is followed by another."""
KEPT: Final = "weights that did not load: the worker acknowledged the update and computes with the weights before it"
STALE: Final = "a layer or an expert that did not load, or was loaded without its scale or its transposed layout"
CACHED: Final = "KV or a prefix of the old weights that stayed in the cache"


class Updated(NamedTuple):
    """The answers after an update."""

    way: str
    is_back: bool
    """True if it is the update back to the original weights."""
    generations: list[Generation]
    numbers: tuple[Number, ...]
    """Times of the update."""


@dataclass(slots=True)
class Stream:
    """The tokens of a stream across an update."""

    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Updates(Stage):
    """The stage."""

    name = "updates"
    bar = "after each update the fleet answers as a worker that was started with these weights"
    changes_fleet = True
    measure_share = 2.0
    conclude_share = 1.0

    def __init__(self) -> None:
        self._baseline: Baseline | None = None
        self._copies: Copies | None = None
        self._updates: list[Updated] = []
        self._findings: list[Finding] = []

    def refusal(self, proof: Proof) -> str | None:
        """Return why weights cannot be updated here."""
        if proof.folder is None:
            return "it loads a changed copy of the checkpoint, whose directory --model must name"
        return None if proof.fleet.engine.weight_updates else "the engine cannot replace its weights"

    async def measure(self, proof: Proof) -> Outcome | None:
        """Update the fleet by each way and back, and record its answers."""
        if proof.folder is None:
            raise StageRefused("no checkpoint")
        await _check_source(proof)
        baseline = self._baseline = await undisturbed(proof, self.name)
        copies = self._copies = await asyncio.to_thread(copy_checkpoint, proof.folder, proof.scratch)
        await self._by_delta(proof, baseline, copies)
        await self._by_path(proof, baseline, copies)
        reason = "the engine has none; --engine-args has weight_transfer_config"
        if proof.fleet.engine.weight_transfer:
            reason = "it needs a process of the trainer that sends the weights to this fleet's group"
        self._skip("by the transfer engine", reason)
        paused = [number.value for update in self._updates for number in update.numbers if "paused" in number.name]
        findings = [self._judge(baseline, update, baseline.generations) for update in self._updates if update.is_back]
        headline = f"paused {max(paused):.2f} s" if paused else ""
        return Outcome(findings=(*findings, *self._findings), headline=headline)

    async def conclude(self, proof: Proof) -> Outcome | None:
        """Compare with a worker that is started with the changed weights."""
        baseline = self._baseline
        if baseline is None or self._copies is None or not self._updates:
            return None
        async with proof.own_fleet(flags=("--model", str(self._copies.changed))) as fleet:
            fresh = await complete_all(fleet.rb, renew(baseline.requests, "fresh"))
        findings = [self._judge(baseline, update, fresh) for update in self._updates if not update.is_back]
        if not baseline.tells_apart(baseline.generations, fresh):
            findings.append(Finding(verdict=Verdict.LOOK, what="the change is too small to tell the weights apart"))
        return Outcome(findings=tuple(findings))

    def _skip(self, what: str, reason: str) -> None:
        self._findings.append(Finding(verdict=Verdict.NOT_RUN, what=f"{what}: {reason}"))

    async def _by_path(self, proof: Proof, baseline: Baseline, copies: Copies) -> None:
        # A fleet in use must not record a directory that goes away with this command.
        original = copies.original if proof.is_own or proof.folder is None else proof.folder
        fleet = proof.rb.fleet
        try:
            for folder in (copies.changed, original):
                await fleet.check_weights(folder, model=proof.model)
        except RollbusError as exc:
            if proof.is_own:
                raise
            return self._skip("by path", str(exc))
        version = next_version(proof)
        update = fleet.update_weights(copies.changed, version=version, model=proof.model)
        try:
            async with streaming(proof, baseline.requests, version) as streams:
                result = await update
            await self._record(proof, baseline, "by path", result)
        finally:
            # Also after an error or at the end of the time: a fleet in use must not keep the changed weights.
            result = await fleet.update_weights(original, version=next_version(proof), model=proof.model)
        await self._record(proof, baseline, "by path", result, is_back=True)
        self._findings.append(await judge_cut(proof, streams, version))
        return None

    async def _by_delta(self, proof: Proof, baseline: Baseline, copies: Copies) -> None:
        if not proof.fleet.engine.weight_deltas:
            return self._skip("by delta", "the workers take no published deltas")
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if free < 3 * copies.num_bytes:
            needed = f"an anchor and its copy need {size(3 * copies.num_bytes)} in {tempfile.gettempdir()}"
            return self._skip("by delta", f"{needed}, which has {size(free)}")
        available = memory_bytes() or 0
        if available < 2 * copies.num_bytes:
            needed = f"the publisher needs {size(2 * copies.num_bytes)} of memory for the model and its changes"
            return self._skip("by delta", f"{needed}, and {size(available)} are available")
        version = next_version(proof)
        async with WeightPublisher(proof.rb, model=proof.model, checkpoint=copies.original) as weights:
            await weights.publish(folder_tensors(copies.original), version=version, update=False)
            try:
                changed = await weights.publish(folder_tensors(copies.changed), version=version + 1)
                await self._record(proof, baseline, "by delta", changed.ledger)
            finally:
                # As in `_by_path`: a fleet in use must not keep the changed weights.
                original = await weights.publish(folder_tensors(copies.original), version=version + 2)
            await self._record(proof, baseline, "by delta", original.ledger, is_back=True)
            if changed.is_anchor or original.is_anchor:
                self._skip("a delta", "the publisher stored the whole checkpoint instead")
        return None

    async def _record(
        self, proof: Proof, baseline: Baseline, way: str, result: CommandResult | None, *, is_back: bool = False
    ) -> None:
        """Record what the fleet answers after an update."""
        salt = f"{way}-{len(self._updates)}".replace(" ", "-")
        generations = await complete_all(proof.rb, renew(baseline.requests, salt))
        timings = [] if result is None else [(ack.timing, ack.verified) for ack in result.applied.values()]
        seconds = {
            "staged": max((timing.staged_s for timing, _ in timings if timing), default=0.0),
            "paused": result.paused_s if result and result.paused_s else 0.0,
            "verified": max(((v.seconds if v else 0.0) + (t.canary_s if t else 0.0) for t, v in timings), default=0.0),
        }
        numbers = tuple(Number(name=f"{way}, {name}", value=value, unit="s") for name, value in seconds.items())
        self._updates.append(Updated(way, is_back, generations, numbers))

    def _judge(self, baseline: Baseline, update: Updated, expected: list[Generation]) -> Finding:
        """Judge the answers after an update."""
        # Answers like those before the update rather than like those of the new weights.
        before = self._updates[0].generations if update.is_back else baseline.generations
        is_kept = baseline.tells_apart(before, expected) and (
            mean_of(before, update.generations) < mean_of(expected, update.generations)
        )
        what = f"{update.way}, and back" if update.is_back else update.way
        causes = (KEPT,) if is_kept else (STALE, CACHED)
        finding = baseline.judge(what, update.generations, *causes, expected=expected)
        if is_kept:
            finding = replace(finding, verdict=Verdict.WRONG, what=f"{finding.what}; the answers did not change")
        return replace(finding, numbers=(*finding.numbers, *update.numbers))


async def _check_source(proof: Proof) -> None:
    """Check that a fleet in use serves the weights that it gets back at the end.

    Raises:
        StageRefused: it has other weights than those of --model, for example those of a training step.
    """
    state = (await proof.rb.fleet.state()).desired.get(proof.model)
    recorded = [] if state is None else [one.command for registers in state.everywhere for one in registers.values()]
    sources = {str(one.source) for one in recorded if isinstance(one, UpdateWeights)}
    sources |= {"a transfer engine" for one in recorded if isinstance(one, FinishWeightUpdate)}
    others = sources - {str(proof.folder)}
    if others and not proof.is_own:
        raise StageRefused(
            f"the fleet serves the weights of {', '.join(sorted(others))}; name this directory with --model, or load "
            f"{proof.folder} first: the stage ends with the weights of --model"
        )


def next_version(proof: Proof) -> int:
    """Return a version above that of each worker of the model."""
    return 1 + max(worker.weight_version for worker in proof.rb.fleet.workers if worker.model == proof.model)


@asynccontextmanager
async def streaming(proof: Proof, requests: Sequence[GenerateRequest], version: int) -> AsyncIterator[list[Stream]]:
    """Stream answers while the body updates the fleet to `version`. Leave each stream after some of its tokens.

    The list is filled when the body has ended: the streams that have tokens of both versions.
    """
    found: list[Stream] = []
    begun, is_updated = asyncio.Semaphore(0), False

    async def stream(request: GenerateRequest) -> None:
        # One token less than fits: the whole text is later the prompt of one more token.
        room = min(MAX_STREAMED, proof.fleet.engine.max_model_len - request.prompt_len - 1)
        for number in itertools.count():
            sampling = replace(request.sampling, max_tokens=room)
            (own,) = renew([replace(request, sampling=sampling)], f"cut-{request.request_id}-{number}")
            current = Stream(own)
            async with contextlib.aclosing(proof.rb.generate(own)) as chunks:
                async for chunk in chunks:
                    if chunk.logprobs is not None:
                        current.token_ids += chunk.token_ids.tolist()
                        current.logprobs += chunk.logprobs.tolist()
                        current.versions += [chunk.weight_version] * chunk.num_tokens
                    begun.release()
                    if current.versions.count(version) >= NUM_NEW:
                        break
            if set(current.versions) > {version}:
                found.append(current)
            if is_updated or version in current.versions:
                return

    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            tasks.create_task(stream(request), name="stream across an update")
        for _ in range(4 * len(requests)):
            await begun.acquire()
        yield found
        is_updated = True


async def judge_cut(proof: Proof, streams: Sequence[Stream], version: int) -> Finding:
    """Judge the cut between two versions, after the original weights are back.

    The engine computes each sampled text once more with the original weights. The tokens of the version before must
    have these log probabilities, and the others must not.
    """
    if not streams:
        return Finding(verdict=Verdict.LOOK, what="version cut: no stream ran across the update")
    if any(stream.versions != sorted(stream.versions) for stream in streams):
        return Finding(verdict=Verdict.WRONG, what="version cut: a token of the old version follows one of the new")
    again = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    requests = [
        replace(stream.request, prompt_token_ids=[*stream.request.prompt_token_ids, *stream.token_ids], sampling=again)
        for stream in streams
    ]
    old, new = list[npt.NDArray[np.float64]](), list[npt.NDArray[np.float64]]()
    for stream, result in zip(streams, await complete_all(proof.rb, renew(requests, "again")), strict=True):
        if result.prompt_logprobs is None:
            return Finding(verdict=Verdict.NOT_RUN, what="version cut: the engine returns no logprobs of prompts")
        is_new = np.array(stream.versions) >= version
        difference = np.abs(result.prompt_logprobs[stream.request.prompt_len - 1 :] - np.array(stream.logprobs))
        old, new = [*old, difference[~is_new]], [*new, difference[is_new]]
    before, after = np.concatenate(old), np.concatenate(new)
    number = limited("p99", float(np.quantile(before, 0.99)), proof.dtype)
    finding = measured("tokens before the cut", number)
    text = f"version cut: {len(streams)} streams, {len(before)} tokens of the old weights, {len(after)} of the new"
    if float(np.mean(after)) <= TOLD_APART * float(np.mean(before)):
        text += "; the tokens of the new version have the log probabilities of the old weights"
        return replace(finding, verdict=Verdict.WRONG, what=text, causes=(KEPT,))
    return replace(finding, what=text if finding.verdict is Verdict.OK else f"{text}; {finding.what}")
