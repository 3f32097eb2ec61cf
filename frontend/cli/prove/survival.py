"""The stage `survival`: after each event, the fleet must answer as the undisturbed fleet did.

The events are a killed worker, a prefill and a decode worker in place of one, an adapter, and sleep.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ....bus import Generation, WeightPublisher
from ....schemas.control import LOAD_TIMEOUT_S
from ....schemas.errors import RollbusError
from ..exits import CommandFailed
from ..local.up import through_folder
from .checkpoint import read_tensors
from .probe import Baseline, complete_all, kill_worker, make_probes, renew, undisturbed
from .stage import Proof, Stage, StageRefused, failure
from .verdicts import Finding, Number, Outcome, Verdict

NUM_KILLED: Final = 256
"""Generated tokens of each request during which a worker is killed."""
ADAPTER: Final = "rollbus-prove"
RANK: Final = 8
TARGETS: Final = re.compile(r"\.(q_proj|v_proj|q_b_proj|kv_b_proj|o_proj)\.weight$")
"""The modules with an adapter. Most families have some of them."""
SCALE: Final = 0.1
"""Standard deviation of an adapter's second factor: its product is of the size of a weight."""
SLEEP_LEVELS: Final[tuple[Literal[1, 2], ...]] = (1, 2)
RESUMED: Final = "a resumed stream that repeats or lacks a token, or has other sampling parameters"
KV: Final = "KV that arrived incomplete, in another order of blocks or in another dtype"
ADAPTED: Final = "an adapter that stays in the base model, or that was not loaded"
ASLEEP: Final = "weights or KV that did not survive the sleep"


class Survival(Stage):
    """The stage."""

    name = "survival"
    bar = "after a kill, prefill and decode apart, an adapter and sleep, the answers equal those of an undisturbed run"
    changes_fleet = True
    measure_share = 2.0
    conclude_share = 1.0

    def __init__(self) -> None:
        self._baseline: Baseline | None = None
        self._ran: list[Finding] = []

    async def measure(self, proof: Proof) -> Outcome | None:
        """Let the shared fleet sleep, load an adapter, and lose a worker."""
        baseline = self._baseline = await undisturbed(proof, self.name)
        findings: list[Finding] = []
        for what, event in (("sleep", _sleep), ("adapter", _adapt), ("kill", _kill)):
            findings += await _try(what, event(proof, baseline))
        return self._outcome(findings)

    async def conclude(self, proof: Proof) -> Outcome | None:
        """Answer with a prefill and a decode worker."""
        if self._baseline is None:
            return None
        return self._outcome(await _try("prefill and decode", _split(proof, self._baseline)))

    def _outcome(self, findings: list[Finding]) -> Outcome:
        self._ran += [finding for finding in findings if finding.verdict is not Verdict.NOT_RUN]
        equal = sum(finding.verdict is Verdict.OK for finding in self._ran)
        return Outcome(findings=tuple(findings), headline=f"{equal} of {len(self._ran)} equal")


async def _try(what: str, event: Awaitable[list[Finding]]) -> list[Finding]:
    """Return the findings of an event. If it cannot happen here, or fails, the other events still can happen."""
    try:
        return await event
    except (RollbusError, OSError, BaseExceptionGroup) as exc:
        (finding,) = failure(exc).findings
        return [replace(finding, what=f"{what}: {finding.what}")]


async def _sleep(proof: Proof, baseline: Baseline) -> list[Finding]:
    """Let the engines sleep at both levels and wake them."""
    if not proof.fleet.engine.sleep:
        raise StageRefused("the engine has none: on GPUs, --engine-args '{\"enable_sleep_mode\": true}'")
    findings = []
    for level in SLEEP_LEVELS:
        try:
            slept = await proof.rb.fleet.sleep(level, model=proof.model)
        finally:
            # Also after an error or at the end of the time: a fleet in use must not stay asleep.
            woken = await proof.rb.fleet.wake(model=proof.model, timeout_s=LOAD_TIMEOUT_S)
        found = await complete_all(proof.rb, renew(baseline.requests, f"sleep-{level}"))
        finding = baseline.judge(f"sleep at level {level} and wake", found, ASLEEP)
        numbers = (("slept after", slept.seconds), ("woken after", woken.seconds))
        times = tuple(Number(name=f"level {level}, {name}", value=value, unit="s") for name, value in numbers)
        findings.append(replace(finding, numbers=(*finding.numbers, *times)))
    return findings


async def _adapt(proof: Proof, baseline: Baseline) -> list[Finding]:
    """Load an adapter of random factors twice, and unload it after each time."""
    engine = proof.fleet.engine
    if not engine.max_loras:
        raise StageRefused("the engine takes none: --engine-args '{\"enable_lora\": true}'")
    if not engine.weight_deltas:
        raise StageRefused("the workers take none from the object store")
    if proof.folder is None:
        raise StageRefused("it is made for the modules of the checkpoint, whose directory --model must name")
    rank = min(RANK, engine.max_lora_rank or RANK)
    tensors = dict(await asyncio.to_thread(make_adapter, proof.folder, rank))
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": modules}
    loaded, findings = list[list[Generation]](), []
    async with WeightPublisher(proof.rb, model=proof.model) as weights:
        for time in (1, 2):
            await weights.publish_adapter(ADAPTER, tensors.items(), version=time, config=config)
            try:
                loaded.append(await complete_all(proof.rb, renew(baseline.requests, f"adapter-{time}", ADAPTER)))
                beside = await complete_all(proof.rb, renew(baseline.requests, f"beside-{time}"))
            finally:
                await proof.rb.fleet.unload_lora(ADAPTER, model=proof.model)
            found = await complete_all(proof.rb, renew(baseline.requests, f"without-{time}"))
            findings.append(baseline.judge(f"base beside the adapter, time {time}", beside, ADAPTED))
            findings.append(baseline.judge(f"adapter unloaded, time {time}", found, ADAPTED))
    findings.append(baseline.judge("adapter loaded again", loaded[1], ADAPTED, expected=loaded[0]))
    if not baseline.tells_apart(baseline.generations, loaded[0]):
        findings.append(Finding(verdict=Verdict.WRONG, what="the adapter changes nothing", causes=(ADAPTED,)))
    return findings


async def _kill(proof: Proof, baseline: Baseline) -> list[Finding]:
    """Kill a worker in mid-stream. Other workers, or its next process, resume the requests."""
    if not proof.is_own:
        raise StageRefused("only on the command's own fleet: with --nats, the process may be on another machine")
    requests = make_probes(proof.fleet.engine, proof.model, NUM_KILLED)
    expected = await complete_all(proof.rb, renew(requests, "unkilled"))
    try:
        killed = await kill_worker(proof.rb, renew(requests, "killed"))
    except CommandFailed as exc:
        return [Finding(verdict=Verdict.LOOK, what=f"kill: {exc}")]
    await proof.rb.fleet.wait_for_workers(len(proof.fleet.workers), model=proof.model, timeout_s=LOAD_TIMEOUT_S)
    finding = baseline.judge("kill -9 in mid-stream", killed.generations, RESUMED, expected=expected)
    return [replace(finding, what=f"{finding.what}; {killed.num_moved} of {len(requests)} requests resumed")]


async def _split(proof: Proof, baseline: Baseline) -> list[Finding]:
    """Answer with a prefill and a decode worker in place of one worker for both phases."""
    folder = proof.scratch / "kv"
    await asyncio.to_thread(folder.mkdir)
    kv = proof.args.kv_transfer_config or through_folder(str(folder))
    flags = ("--kv-transfer-config", kv) if proof.fleet.engine.engine == "vllm" else ()
    async with proof.own_fleet(num_workers=2, num_prefill=1, flags=flags) as fleet:
        requests = make_probes(fleet.engine, proof.model)
        found = await complete_all(fleet.rb, renew(requests, "split"))
        num_split = sum(len(set(generation.worker_ids)) > 1 for generation in found)
    finding = baseline.judge("prefill and decode apart", found, KV)
    finding = replace(finding, what=f"{finding.what}; {num_split} of {len(found)} requests had two phases")
    if not num_split:
        finding = replace(finding, verdict=Verdict.LOOK, what=f"{finding.what}; no prompt was long enough for that")
    return [finding]


def make_adapter(model: Path, rank: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield the tensors of an adapter of random factors for the attention of a checkpoint. Blocks.

    Raises:
        StageRefused: the checkpoint has none of the modules of `TARGETS`.
    """
    targets = {
        name: tensor.shape
        for file in sorted(model.glob("*.safetensors"))
        for name, tensor in read_tensors(file).items()
        if TARGETS.search(name) and len(tensor.shape) == 2
    }
    if not targets:
        raise StageRefused(f"the checkpoint has no module of {TARGETS.pattern}")
    random = np.random.default_rng(0)
    for name, (rows, columns) in targets.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        yield f"{stem}.lora_A.weight", random.normal(0, 1 / math.sqrt(columns), (rank, columns)).astype(np.float32)
        yield f"{stem}.lora_B.weight", random.normal(0, SCALE, (rows, rank)).astype(np.float32)
