"""Collects what `agreement` and `routing` judge: tokens of a fleet, computed twice, and a reference's passes.

Each prompt is sent in several ways. What the engine computes must depend on none of them:

- `alone`: greedy, without other requests, with a salt of its own, so that no prefix is cached
- `batch`: greedy, all prompts at once; the prefix cache may have earlier KV, which must be of the same weights
- `again`: the same once more, so that the prefix cache has the prompt
- `sampled`: temperature 1 and nothing that changes the distribution
- `yours`: the user's prompts with the user's sampling parameters

Then the engine computes each sequence a second time as a prompt (`prompt_logprobs`). This pass reads no prefix cache. A
long sequence runs in chunks.
"""

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, get_args

import msgspec
import numpy as np

from ....bus import GenerateRequest, Generation, SamplingParams
from ....schemas.errors import RequestError
from ....schemas.presence import Capabilities
from ....schemas.reference import (
    MAX_FILE_BYTES,
    MAX_SEQUENCES,
    Dtype,
    Floats,
    Ints,
    ReferenceJob,
    ReferenceResult,
    ReferenceSequence,
    TokenScores,
    decode,
    encode,
)
from ..exits import CommandFailed
from ..local.processes import ProcessSpec, run_tool
from ..options import python_env, python_module
from .probe import complete_all
from .stage import Proof, StageRefused

LENGTHS: Final = (5, 33, 150, 600)
"""Tokens of the prompts of a round: below, within and above usual block sizes of the KV cache."""
NUM_TOKENS: Final = 32
"""Tokens of an answer."""
NUM_SAMPLES: Final = 2
"""Samples of each of two requests of a prompt with temperature 1."""
MAX_TOP: Final = 20
"""Most likely tokens of each position: by default, engines return no more."""
MAX_ROUNDS: Final = 24
"""Rounds of new prompts: about 15,000 sampled tokens. More change no figure."""
TIME_SHARE: Final = 0.6
"""Part of the phase after which no round is begun. A round takes about as long as the one before."""
MOST_SHARE: Final = 0.9
"""Part of the phase after which the round or the reference that runs is left."""
IN_FLIGHT: Final = 64
"""Requests at once. A batch of this size uses other kernels than a single request."""
FIRST_ID: Final = 3
"""Ids below are often special tokens."""


@dataclass(slots=True, kw_only=True)
class Sampled:
    """One answer, and its sequence of n tokens as the engine and the reference compute it again."""

    arm: str
    """The way it was sent."""
    prompt: int
    """Number of the prompt. Greedy answers of one prompt are equal but for ties."""
    prompt_len: int
    token_ids: Ints
    """i4[n]: prompt and answer."""
    logprobs: Floats
    """f4[G]: log probabilities of the answer."""
    top_ids: Ints
    """i4[G, K]: the most likely tokens at each position of the answer."""
    top_logprobs: Floats
    """f4[G, K]: their log probabilities."""
    cached: int = 0
    """Tokens of the prompt that the prefix cache had."""
    is_neutral: bool = True
    """True: the sampling parameters keep the model's distribution."""
    versions: tuple[int, ...] = ()
    rows: Ints | None = None
    """i4[n - 1, layers, top_k]."""
    second: Floats | None = None
    """f4[n - 1]: log probabilities of all tokens but the first, of the second pass."""
    scores: TokenScores | None = None
    noise: TokenScores | None = None
    """The reference in another dtype: how much rounding changes."""


@dataclass(slots=True, kw_only=True)
class Evidence:
    """All answers, and what is known of the reference."""

    sampled: list[Sampled]
    num_experts: int = 0
    layers: Sequence[int] = ()
    """Index in the rows of each layer with experts."""
    notes: list[str] = field(default_factory=list)
    """What was not measured, and why."""
    changes: list[str] = field(default_factory=list)
    """Sampling parameters of the user's prompts that change the distribution."""
    facts: dict[str, str] = field(default_factory=dict)
    """Facts of the model and the fleet that explain differences."""
    reference_refusal: str | None = None
    routing_refusal: str | None = None
    misfit: str | None = None
    """How the rows do not fit the reference's routers."""


async def collect(proof: Proof) -> Evidence:
    """Return the answers of the fleet, which the first stage that needs them collects."""
    if "answers" not in proof.evidence:
        proof.evidence["answers"] = await _Collection(proof).run()
    found: Evidence = proof.evidence["answers"]
    return found


class _Collection:
    def __init__(self, proof: Proof) -> None:
        self._proof = proof
        self._engine: Capabilities = proof.fleet.engine
        self._rng = np.random.default_rng(proof.args.seed)
        self._has_second = True
        self._num_top = min(MAX_TOP, self._engine.max_logprobs)
        routing = self._engine.routed_experts
        facts = {"logprobs_mode": self._engine.logprobs_mode, "dtype": proof.dtype}
        self._evidence = Evidence(sampled=[], num_experts=routing.num_experts if routing else 0, facts=facts)
        if routing is None and self._engine.routing_refusal is not None:
            self._evidence.routing_refusal = self._engine.routing_refusal

    async def run(self) -> Evidence:
        """Send rounds of prompts until the time is used. What was answered until then counts."""
        left, before = self._proof.seconds_left(), 0.0
        limit = asyncio.timeout(MOST_SHARE * left)
        try:
            async with limit:
                for number in range(MAX_ROUNDS):
                    started = self._proof.seconds_left()
                    if number and left - started + before > TIME_SHARE * left:
                        break
                    await self._round(number)
                    before = started - self._proof.seconds_left()
        except TimeoutError:
            if not limit.expired():
                raise
            if not self._evidence.sampled:
                raise StageRefused(f"no prompt was answered in {left:.0f} s; set --minutes higher") from None
            self._evidence.notes.append(f"not all ways to send a prompt: {left:.0f} s are too short for a round")
        return self._evidence

    def _prompts(self, number: int) -> list[Ints]:
        if number == 0 and self._proof.prompts:
            bos = self._proof.config.get("bos_token_id")
            if any(list(request.prompt_token_ids[:2]) == [bos, bos] for request in self._proof.prompts):
                self._evidence.facts["double_bos"] = str(bos)
            room = self._engine.max_model_len - NUM_TOKENS
            return [np.asarray(request.prompt_token_ids, "i4")[-room:] for request in self._proof.prompts]
        lengths = [min(length, max(self._engine.max_model_len - NUM_TOKENS, 1)) for length in LENGTHS]
        return [
            self._rng.integers(min(FIRST_ID, self._engine.vocab_size - 1), self._engine.vocab_size, length, "i4")
            for length in lengths
        ]

    async def _round(self, number: int) -> None:
        prompts = self._prompts(number)
        sampled = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, n=NUM_SAMPLES, logprobs=self._num_top)
        greedy = msgspec.structs.replace(sampled, temperature=0.0, n=1)
        # Two requests with the same prompt show a seed that both have.
        for arm, sampling in (("batch", greedy), ("alone", greedy), ("again", greedy), *[("sampled", sampled)] * 2):
            salts = [uuid.uuid4().hex if arm == "alone" else None for _ in prompts]
            requests = [
                GenerateRequest(prompt_token_ids=ids, sampling=sampling, model=self._proof.model, cache_salt=salt)
                for ids, salt in zip(prompts, salts, strict=True)
            ]
            await self._send(arm, number, requests, 1 if arm == "alone" else IN_FLIGHT)
        if number == 0 and self._proof.prompts:
            await self._send("yours", number, self._yours(), IN_FLIGHT)

    def _yours(self) -> list[GenerateRequest]:
        requests = []
        for request in self._proof.prompts:
            sampling = request.sampling
            for name in CHANGING:
                value = getattr(sampling, name)
                if value != getattr(SamplingParams(), name) and not (name == "temperature" and value == 0.0):
                    self._evidence.changes.append(f"{name}={value}")
            limit = min(sampling.max_tokens or NUM_TOKENS, self._engine.max_model_len - request.prompt_len, 512)
            if limit < 1:
                raise StageRefused(f"a prompt of --prompts has {request.prompt_len} tokens, which is too long")
            minimum = min(sampling.min_tokens, limit)
            changed = msgspec.structs.replace(
                sampling, max_tokens=limit, min_tokens=minimum, logprobs=self._num_top, n=1
            )
            requests.append(
                msgspec.structs.replace(
                    request, sampling=changed, model=self._proof.model, request_id=uuid.uuid4().hex,
                    return_routed_experts=None, routed_experts_prompt_start=0, timeout_s=None,
                )
            )  # fmt: skip
        self._evidence.changes = sorted(set(self._evidence.changes))
        return requests

    async def _send(self, arm: str, number: int, requests: Sequence[GenerateRequest], at_once: int) -> None:
        """Complete the requests, and compute their sequences again as prompts."""
        numbers = {request.request_id: number * 10_000 + i for i, request in enumerate(requests)}
        answers = await self._complete(requests, at_once)
        added = [_sampled(arm, numbers[answer.request_id], answer) for answer in answers if len(answer.token_ids)]
        self._evidence.sampled += added
        if not self._has_second:
            return
        # The engine must have room for one more token.
        fitting = [each for each in added if len(each.token_ids) < self._engine.max_model_len]
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        seconds = [
            GenerateRequest(prompt_token_ids=each.token_ids, sampling=sampling, model=self._proof.model)
            for each in fitting
        ]
        try:
            for one, answer in zip(fitting, await self._complete(seconds, IN_FLIGHT), strict=True):
                one.second = answer.prompt_logprobs
        except StageRefused as exc:
            self._has_second = False
            self._evidence.notes.append(f"no second pass: {exc}")

    async def _complete(self, requests: Sequence[GenerateRequest], at_once: int) -> list[Generation]:
        try:
            return await complete_all(self._proof.rb, requests, max_in_flight=at_once)
        except RequestError as exc:
            if exc.code == "unsupported":
                raise StageRefused(str(exc)) from exc
            raise


CHANGING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words_token_ids", "min_tokens", "extra"),
)
"""Sampling parameters that change the distribution from which tokens are sampled."""


def _sampled(arm: str, prompt: int, answer: Generation) -> Sampled:
    sampling = answer.request.sampling
    if answer.logprobs is None:
        raise StageRefused("the fleet returns no log probabilities")
    rows = answer.routed_experts
    none: Ints = np.empty((len(answer.token_ids), 0), "i4")
    return Sampled(
        arm=arm,
        prompt=prompt,
        prompt_len=answer.prompt_len,
        token_ids=np.concatenate([np.asarray(answer.request.prompt_token_ids, "i4"), answer.token_ids]),
        logprobs=answer.logprobs,
        top_ids=none if answer.top_token_ids is None else answer.top_token_ids,
        top_logprobs=none.astype("f4") if answer.top_logprobs is None else answer.top_logprobs,
        cached=answer.cached_tokens or 0,
        # Answers with a common seed are not independent.
        is_neutral=all(getattr(sampling, name) == getattr(SamplingParams(), name) for name in (*CHANGING, "seed")),
        versions=tuple(sorted(set(answer.weight_versions.tolist()))),
        rows=None if rows is None or answer.start else rows.astype("i4"),
    )


async def add_reference(proof: Proof) -> Evidence:
    """Return the evidence with the reference's passes, which the first stage that needs them computes."""
    evidence: Evidence = proof.evidence["answers"]
    if "passes" in proof.evidence:
        return evidence
    proof.evidence["passes"] = True
    if proof.args.reference == "none":
        evidence.reference_refusal = "--reference none"
        return evidence
    if proof.folder is None:
        evidence.reference_refusal = "the checkpoint is not on this machine; name its directory with --model DIR"
        return evidence
    chosen = _spread(evidence.sampled)[:MAX_SEQUENCES]
    engine = proof.fleet.engine
    dtypes: tuple[Dtype, ...] = get_args(Dtype)
    main: Dtype = next((name for name in dtypes if name == (proof.args.dtype or engine.dtype)), "bfloat16")
    job = ReferenceJob(
        folder=str(proof.folder),
        dtypes=[main] if main == "float32" else [main, "float32"],
        sequences=[ReferenceSequence(token_ids=each.token_ids, rows=each.rows) for each in chosen],
        seconds=proof.seconds_left() * TIME_SHARE,
    )
    try:
        async with asyncio.timeout(proof.seconds_left() * MOST_SHARE) as limit:
            result = await run_reference(job, proof.scratch)
    except (StageRefused, TimeoutError) as exc:
        # The engine's second pass is judged without it.
        is_late = limit.expired()
        evidence.reference_refusal = "its time was too short to load; set --minutes higher" if is_late else str(exc)
        return evidence
    evidence.layers, evidence.misfit = result.layers, result.misfit
    evidence.routing_refusal = evidence.routing_refusal or result.routing_refusal
    evidence.facts |= result.facts
    for name, done in zip(("scores", "noise"), result.passes, strict=False):
        for one, scores in zip(chosen, done.sequences, strict=False):
            setattr(one, name, scores)
    first = result.passes[0]
    proof.reference = f"transformers {result.release} in {first.dtype} on {first.device}"
    if len(first.sequences) < len(chosen) or len(chosen) < len(evidence.sampled):
        evidence.notes.append(f"the reference computed {len(first.sequences)} of {len(evidence.sampled)} answers")
    return evidence


def _spread(sampled: Sequence[Sampled]) -> list[Sampled]:
    """Return the answers in turns of their arms, so that each part of them has all arms."""
    by_arm = ([each for each in sampled if each.arm == arm] for arm in dict.fromkeys(each.arm for each in sampled))
    return [each for turn in itertools.zip_longest(*by_arm) for each in turn if each is not None]


async def run_reference(job: ReferenceJob, folder: Path) -> ReferenceResult:
    """Run the program of the reference and return its result.

    Cancellation: kills the program.

    Raises:
        StageRefused: it cannot compute the job. The message has its last line.
    """
    job_path, result_path = folder / "job.msgpack", folder / "result.msgpack"
    data = encode(job)
    if len(data) > MAX_FILE_BYTES:
        raise StageRefused(f"the answers are larger than {MAX_FILE_BYTES} bytes")
    await asyncio.to_thread(job_path.write_bytes, data)
    command = [*python_module("rollbus.trainer.reference"), str(job_path), str(result_path)]
    try:
        await run_tool(ProcessSpec("the reference", command, python_env()))
        if (await asyncio.to_thread(result_path.stat)).st_size > MAX_FILE_BYTES:
            raise StageRefused(f"the result of the reference is larger than {MAX_FILE_BYTES} bytes")
        return decode(await asyncio.to_thread(result_path.read_bytes), ReferenceResult)
    except (CommandFailed, msgspec.MsgspecError) as exc:
        raise StageRefused(str(exc)) from exc
