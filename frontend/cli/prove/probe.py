"""Greedy answers of a fleet, and their comparison with the answers of an undisturbed run."""

import asyncio
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ....bus import Client, GenerateRequest, Generation, SamplingParams
from ....bus.client.client import runtime_of
from ....bus.protocol.fleet.canary import EXACT_LOGPROBS, STRIDE, count_same, measure_agreement
from ....schemas.presence import Capabilities
from ....schemas.rows import Rows, expected_rows
from ..exits import CommandFailed
from ..generate.results import first_error
from .stage import Proof
from .verdicts import LARGEST, Finding, Verdict, limit_of, limited, measured, worst

NUM_PROBES: Final = 8
"""Requests that are answered together: several streams are in flight when something happens to a worker."""
NUM_TOKENS: Final = 64
"""Generated tokens of each request."""
SHORTEST: Final = 16
NUM_LENGTHS: Final = 5
"""The prompts have this number of lengths, each twice the length before it."""
MIN_COMPARED: Final = 0.25
"""Share of the tokens that must be comparable for the verdict `ok`. Tokens after a tie belong to another text."""
MIN_SHIFTED: Final = 8
"""Equal tokens after a different one that show that it was inserted or lost. Another text does not have them."""
MAX_SHOWN: Final = 2
"""Requests that a finding names."""
IN_FLIGHT: Final = 512
"""Requests that are open at the same time, as by default."""
POLL_S: Final = 0.01
"""Seconds between two looks at the number of received tokens."""
MAX_POLLS: Final = 6000
"""A minute: enough for the first tokens on a busy machine."""


class Killed(NamedTuple):
    """The results of requests during which a worker was killed."""

    worker: str
    generations: list[Generation]
    num_moved: int
    """Number of results that took more than one attempt."""


def make_probes(engine: Capabilities, model: str, num_tokens: int = NUM_TOKENS) -> list[GenerateRequest]:
    """Return greedy requests with prompts of several lengths. Equal capabilities give equal prompts."""
    room = max(engine.max_model_len // 2, 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=min(num_tokens, room), ignore_eos=True, logprobs=0)
    lengths = [min(SHORTEST << number % NUM_LENGTHS, room) for number in range(NUM_PROBES)]
    return [
        GenerateRequest(
            prompt_token_ids=[(number + 1) * (i + 1) * STRIDE % engine.vocab_size for i in range(length)],
            sampling=sampling,
            model=model,
        )
        for number, length in enumerate(lengths)
    ]


def renew(requests: Sequence[GenerateRequest], salt: str, lora: str | None = None) -> list[GenerateRequest]:
    """Return the same requests with new ids. They share no prefix in a cache with requests of another salt."""
    return [
        replace(request, request_id=f"prove-{salt}-{number}", cache_salt=f"prove-{salt}", lora=lora)
        for number, request in enumerate(requests)
    ]


async def complete_all(
    rb: Client,
    requests: Sequence[GenerateRequest],
    advance: Callable[[], None] = lambda: None,
    *,
    max_in_flight: int = IN_FLIGHT,
) -> list[Generation]:
    """Return the results of the requests with their siblings, in the order of the requests.

    Args:
        advance: called after each request.

    Raises:
        RequestError: a request failed.
    """
    found: dict[str, Generation] = {}
    async for generation in rb.complete_many(requests, max_in_flight=max_in_flight):
        error = first_error(generation)
        if error is not None:
            raise error
        found[generation.request_id] = generation
        advance()
    results = [found[request.request_id] for request in requests]
    return [sample for result in results for sample in (result, *result.siblings)]


def require(condition: bool, problem: str) -> None:
    """End the command if a condition is false.

    Raises:
        CommandFailed: `condition` is false.
    """
    if not condition:
        raise CommandFailed(problem)


def check_rows(generation: Generation) -> Rows:
    """Return the routed experts of a result.

    Raises:
        CommandFailed: a position has none.
    """
    rows = generation.routed_experts
    expected = expected_rows(generation.prompt_len, generation.start, len(generation.token_ids))
    if rows is None or len(rows) != expected:
        found = None if rows is None else len(rows)
        raise CommandFailed(f"request {generation.request_id} has {found} rows of routed experts, not {expected}")
    return rows


async def kill_worker(
    rb: Client, requests: Sequence[GenerateRequest], on_kill: Callable[[str, int, int], None] = lambda *_: None
) -> Killed:
    """Kill a worker of this machine while it answers the requests, and return their results.

    Args:
        on_kill: called after the kill, with the worker's id, its process id and the number of received tokens.

    Raises:
        CommandFailed: a request failed, no request was in flight, or the worker reports no process id.
    """
    worker, *_ = (await rb.fleet.state()).workers
    if worker.pid is None:
        raise CommandFailed(f"worker {worker.worker} reports no process id")
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(complete_all(rb, requests), name="requests of the killed worker")
        calls = runtime_of(rb).coordinator
        for _ in range(MAX_POLLS):
            if calls.num_tokens >= 4 * len(requests) or answering.done():
                break
            await asyncio.sleep(POLL_S)
        received = calls.num_tokens
        os.kill(worker.pid, signal.SIGKILL)
        on_kill(worker.worker, worker.pid, received)
        generations = await answering
    moved = sum(generation.attempts > 1 for generation in generations)
    require(moved > 0, "no request was in flight when the worker was killed")
    return Killed(worker.worker, generations, moved)


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between the answers of two runs to the same greedy requests.

    After the first different token of a request, its two texts differ, so no later token is compared.
    """

    logprobs: npt.NDArray[np.float64]
    """f8[n]: differences of the log probabilities of the compared tokens, in nats."""
    num_tokens: int
    """Number of all tokens."""
    problems: tuple[str, ...] = ()
    """Differences that are no rounding, each with its request."""
    other_choices: float | None = None
    """Share of the expert choices that differ. None: no routed experts."""

    def figures(self) -> dict[str, float]:
        """Return the figures of `verdicts.TABLE`, with the share of tokens whose experts differ."""
        figures = {"p99": float(np.quantile(self.logprobs, 0.99)), "largest": float(np.max(self.logprobs))}
        return figures if self.other_choices is None else {**figures, "other experts": self.other_choices}

    def finding(self, what: str, dtype: str, floor: "Difference", causes: tuple[str, ...] = ()) -> Finding:
        """Judge the difference.

        Args:
            what: beginning of the statement, for example "after the kill".
            floor: difference of the undisturbed engine from itself.
            causes: likely causes if the verdict is not `ok`.
        """
        floors = floor.figures()
        numbers = [limited(name, value, dtype, floors.get(name)) for name, value in self.figures().items()]
        found = measured(what, *numbers)
        verdicts = [found.verdict]
        if self.problems:
            # In a narrow dtype, rounding may exceed the limit of a tie once, but not in two of eight requests.
            is_rounding = len(self.problems) == 1 and dtype != "float32" and NO_TIE in self.problems[0]
            verdicts.append(Verdict.LOOK if is_rounding else Verdict.WRONG)
        if len(self.logprobs) < MIN_COMPARED * self.num_tokens:
            verdicts.append(Verdict.LOOK)
        verdict = worst(verdicts)
        texts = [f"{what}: {len(self.logprobs)} of {self.num_tokens} tokens compared", *self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            texts.append(f"and {len(self.problems) - MAX_SHOWN} more requests")
        if found.verdict is not Verdict.OK:
            texts.append(found.what)
        text = "; ".join(texts) if len(texts) > 1 else f"{texts[0]}, equal up to rounding"
        return replace(found, verdict=verdict, what=text, causes=causes if verdict is not Verdict.OK else ())


NO_TIE: Final = "no tie"


def compare(expected: Sequence[Generation], found: Sequence[Generation], dtype: str) -> Difference:
    """Compare the answers of two runs to the same greedy requests."""
    tie = max(limit_of("p99", dtype).value, EXACT_LOGPROBS)
    differences, problems, shares = [], [], []
    for number, (first, second) in enumerate(zip(expected, found, strict=True)):
        length = min(len(first.token_ids), len(second.token_ids))
        same = count_same(first.token_ids[:length], second.token_ids[:length])
        before, after = _logprobs(first), _logprobs(second)
        differences.append(np.abs(before[:same] - after[:same]))
        problem = None
        if len(first.token_ids) != len(second.token_ids):
            problem = f"it has {len(second.token_ids)} tokens, not {len(first.token_ids)}"
        elif same < length:
            problem = _describe_fork(first.token_ids, second.token_ids, same, (before[same], after[same]), tie)
        if first.routed_experts is not None and second.routed_experts is not None:
            rows = first.prompt_len + max(same - 1, 0)
            shares.append(measure_agreement(first.routed_experts[:rows], second.routed_experts[:rows]))
        elif first.routed_experts is not second.routed_experts:
            problem = "only one of the two runs has routed experts"
        problems += [] if problem is None else [f"request {number}: {problem}"]
    joined = np.concatenate(differences)
    return Difference(
        joined if len(joined) else np.array([LARGEST]),
        sum(len(generation.token_ids) for generation in expected),
        tuple(problems),
        1 - float(np.mean(shares)) if shares else None,
    )


def _logprobs(generation: Generation) -> npt.NDArray[np.float64]:
    if generation.logprobs is None:
        raise CommandFailed(f"request {generation.request_id} has no log probabilities")
    return generation.logprobs.astype(np.float64)


def _describe_fork(
    before: npt.NDArray[np.int32], after: npt.NDArray[np.int32], at: int, logprobs: tuple[float, float], tie: float
) -> str | None:
    """Describe the first different token of two texts of one length. Return None if it is a tie."""
    repeats = " and repeats the token before it" if at and after[at] == after[at - 1] else ""
    rest = len(before) - at - 1
    if rest >= MIN_SHIFTED and np.array_equal(after[at + 1 :], before[at:-1]):
        return f"token {at} was inserted{repeats}"
    if rest >= MIN_SHIFTED and np.array_equal(after[at:-1], before[at + 1 :]):
        return f"token {at} was lost"
    # Two tokens of one distribution have a probability of at most 1 together. So two tied tokens have one half at most.
    if abs(logprobs[0] - logprobs[1]) <= tie and max(logprobs) <= math.log(0.5) + tie:
        return None
    return f"token {at} differs{repeats}, and is {NO_TIE}: the logprobs are {logprobs[0]:.3g} and {logprobs[1]:.3g}"


TOLD_APART: Final = 3.0
"""The change of the weights must move log probabilities by this many times the floor, or no verdict is possible."""


def mean_of(expected: Sequence[Generation], found: Sequence[Generation]) -> float:
    """Return the mean difference of the log probabilities of the first tokens, which both runs sampled after a prompt.

    Texts of other weights soon differ, so the first tokens are what two runs have in common.
    """
    pairs = [(a.logprobs, b.logprobs) for a, b in zip(expected, found, strict=True)]
    return float(np.mean([abs(float(a[0]) - float(b[0])) for a, b in pairs if a is not None and b is not None]))


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the undisturbed fleet answers, and how much it differs from itself."""

    requests: list[GenerateRequest]
    generations: list[Generation]
    floor: Difference
    dtype: str

    def judge(
        self, what: str, found: Sequence[Generation], *causes: str, expected: Sequence[Generation] = ()
    ) -> Finding:
        """Judge answers to these requests against the expected ones, by default those of the undisturbed fleet."""
        difference = compare(expected or self.generations, found, self.dtype)
        return difference.finding(what, self.dtype, self.floor, causes)

    def tells_apart(self, one: Sequence[Generation], other: Sequence[Generation]) -> bool:
        """Return True if the answers of two models differ by far more than those of one model."""
        return mean_of(one, other) > TOLD_APART * float(np.mean(self.floor.logprobs))


async def undisturbed(proof: Proof, salt: str) -> Baseline:
    """Return the present answers of the fleet.

    The floor is the difference of the same requests in two halves: other batches, other kernels.
    """
    requests = make_probes(proof.fleet.engine, proof.model)
    generations = await complete_all(proof.rb, renew(requests, f"{salt}-whole"))
    halves: list[Generation] = []
    for number in range(2):
        half = requests[number * NUM_PROBES // 2 :][: NUM_PROBES // 2]
        halves += await complete_all(proof.rb, renew(half, f"{salt}-half-{number}"))
    return Baseline(requests, generations, compare(generations, halves, proof.dtype), proof.dtype)
