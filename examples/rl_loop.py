"""Reinforcement learning of a tiny mixture of experts, with rollouts over the bus.

Run it with the Python that has rollbus. It starts NATS and the workers, and takes some minutes on two CPU cores:

    python rl_loop.py [--seeds 3] [--steps 40] [--workers 2] [--output rl-output]

The policy, a Qwen3-MoE of 1.7 million random parameters, learns to continue arithmetic progressions of digits (modulo
ten): REINFORCE with the group-normalised advantages of GRPO and truncated importance weights, one update per batch.
Real vLLM workers sample without a pause, and load new weights during their answers. Each token has the version of its
weights and the experts that the sampler chose. The trainer computes with the same experts.

It prints the mean reward of each step, and the KL divergence between sampler and trainer on the same tokens with the
same weights, in bfloat16, with and without the sampler's experts. It writes log.jsonl, learning.svg and logs into
--output. It exits with 0 if replay lowers the divergence and, with 20 steps or more, rewards rise by half.
"""

import argparse
import asyncio
import copy
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

import rollbus
from rollbus import ErrorCode, GenerateRequest, SamplingParams
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.trainer import (
    MicroBatch,
    Sample,
    Stitcher,
    drop_stale,
    group_advantages,
    importance_weights,
    pack,
    replay,
    sampler_kl,
)

NUM_DIGITS = 4
"""Digits in each answer."""
GROUP = 8
"""Answers to one prompt. The advantage of an answer is relative to the others."""
GROUPS_PER_STEP = 32
"""Groups in flight, and the limit of groups that wait for the trainer. So its samples are one or two steps old."""
MAX_WEIGHT_LAG = 2
"""Maximum lag in versions. Requests and answers with older weights are discarded."""
LEARNING_RATE = 4e-3
MAX_TOKENS = 1024
"""Predictions in a micro-batch."""
MIN_LEARNING_STEPS = 20
"""With at least this number of steps, the mean reward of the last ten must be 1.5 times that of the first ten."""
START_TIMEOUT_S = 600.0
POLICY = Qwen3MoeConfig(
    vocab_size=16,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts=64,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=64,
    initializer_range=0.1,
    tie_word_embeddings=False,
)
EMBEDDING_SCALE = 10.0
"""Gives embeddings of size 1, as in trained models. Smaller ones would vanish beside the outputs of the layers."""


def reward_of(prompt: np.ndarray, token_ids: np.ndarray) -> float:
    """Return the share of digits that continue the progression of the prompt."""
    wanted = (prompt[-1] + (prompt[1] - prompt[0]) * np.arange(1, NUM_DIGITS + 1)) % 10
    return float((token_ids == wanted).mean())


@dataclass
class Group:
    """The answers to one prompt. There are none if the weights became too new while the request waited."""

    samples: list[Sample]
    rewards: np.ndarray

    @classmethod
    def of(cls, prompt: np.ndarray, generation: rollbus.Generation) -> "Group":
        """Return the group with an advantage for each answer, relative to the rewards of the group."""
        if generation.error is not None:
            if generation.error.code is not ErrorCode.TOO_STALE:
                raise generation.error
            return cls([], np.empty(0))
        answers = (generation, *generation.siblings)
        rewards = np.array([reward_of(prompt, answer.token_ids) for answer in answers])
        samples = []
        for answer, advantage in zip(answers, group_advantages(rewards), strict=True):
            stitcher = Stitcher()
            stitcher.add(prompt, answer)
            samples.append(stitcher.sample(advantage=float(advantage)))
        return cls(samples, rewards)


class Rollouts:
    """Answers to an endless series of prompts. Requests stay in flight while the trainer computes."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._prompts: dict[str, np.ndarray] = {}
        self._groups: asyncio.Queue[Group] = asyncio.Queue(1)

    def _requests(self) -> Iterator[GenerateRequest]:
        sampling = SamplingParams(max_tokens=NUM_DIGITS, temperature=1.0, n=GROUP, ignore_eos=True)
        while True:
            first, step, num_terms = self._rng.integers((0, 1, 2), (10, 4, 5))
            prompt = ((first + step * np.arange(num_terms)) % 10).astype(np.int32)
            request = GenerateRequest(prompt_token_ids=prompt, sampling=sampling, max_weight_lag=MAX_WEIGHT_LAG)
            self._prompts[request.request_id] = prompt
            yield request

    async def run(self, rb: rollbus.Client) -> None:
        """Send requests and collect answers until cancelled. Cancellation: aborts open requests."""
        async with aclosing(rb.complete_many(self._requests(), max_in_flight=GROUPS_PER_STEP)) as generations:
            async for generation in generations:
                await self._groups.put(Group.of(self._prompts.pop(generation.request_id), generation))

    async def next(self) -> list[Group]:
        """Return the groups of the next step."""
        return [await self._groups.get() for _ in range(GROUPS_PER_STEP)]


class Learner:
    """The policy, in float32.

    Attributes:
        version: version of the current weights.
    """

    def __init__(self, seed: int, version: int) -> None:
        torch.manual_seed(seed)
        self._model = Qwen3MoeForCausalLM(POLICY).train()
        with torch.no_grad():
            self._model.model.embed_tokens.weight *= EMBEDDING_SCALE
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.version = version

    def sampler(self) -> Qwen3MoeForCausalLM:
        """Return a copy of the policy in bfloat16, the dtype of the samplers."""
        return copy.deepcopy(self._model).to(torch.bfloat16).eval()

    def step(self, samples: list[Sample]) -> None:
        """Make one update with the sampler's experts. Importance weights correct for the sampler's older policy."""
        batches = pack(samples, max_tokens=MAX_TOKENS)
        num_trained = sum(int(batch.loss_mask.sum()) for batch in batches)
        for batch in batches:
            with replay(self._model, batch.routed_experts):
                logprobs = logprobs_of(self._model, batch)
                weights = importance_weights(logprobs, batch.sampler_logprobs, batch.loss_mask)
                loss = -(batch.advantages * weights * logprobs)[batch.loss_mask].sum() / num_trained
                loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1


class Comparison:
    """The divergence of sampler and trainer, from a copy of each version's weights. A trainer needs no copies."""

    def __init__(self) -> None:
        self._models: dict[int, Qwen3MoeForCausalLM] = {}

    def remember(self, version: int, model: Qwen3MoeForCausalLM) -> None:
        """Store the weights that the samplers use from now on. Answers of earlier versions may still arrive."""
        self._models[version] = model
        for old in sorted(self._models)[: -MAX_WEIGHT_LAG - 2]:
            del self._models[old]

    @torch.no_grad()
    def divergence(self, samples: list[Sample]) -> tuple[float, float]:
        """Return the KL of sampler and trainer with replay, and without; NaN if there is no answer to compare.

        Answers with tokens of two versions are left out: the KV of their first tokens is of the older version.
        """
        sums, num_tokens = np.zeros(2), 0
        for version, model in self._models.items():
            own = [sample for sample in samples if (sample.weight_versions[sample.loss_mask] == version).all()]
            for batch in pack(own, max_tokens=MAX_TOKENS):
                with replay(model, batch.routed_experts):
                    replayed = logprobs_of(model, batch)
                free = logprobs_of(model, batch)
                count = int(batch.loss_mask.sum())
                for index, logprobs in enumerate((replayed, free)):
                    sums[index] += count * float(sampler_kl(logprobs, batch.sampler_logprobs, batch.loss_mask))
                num_tokens += count
        with_replay, without = sums / num_tokens if num_tokens else (math.nan, math.nan)
        return float(with_replay), float(without)


def logprobs_of(model: Qwen3MoeForCausalLM, batch: MicroBatch) -> torch.Tensor:
    """Return the log probability of each target: f32[1, T]."""
    logits = model(**batch.model_inputs()).logits
    return logits.float().log_softmax(-1).gather(-1, batch.target_ids[..., None])[..., 0]


@dataclass
class Step:
    """A line of the log."""

    seed: int
    step: int
    reward: float
    """Mean of all answers."""
    kl_with_replay: float
    kl_without_replay: float
    lag: int
    """Versions between the weights of the oldest trained token and the trainer's."""
    mixed: float
    """Share of answers with tokens of more than one version."""
    dropped: int
    """Number of requests and answers that were too old."""
    seconds: float
    """Duration of the step, with the comparison."""


async def learn(rb: rollbus.Client, seed: int, version: int, num_steps: int, folder: Path, log: TextIO) -> list[Step]:
    """Train one policy from random weights."""
    learner, comparison, rollouts = Learner(seed, version), Comparison(), Rollouts(seed)

    async def publish() -> None:
        """Publish the current weights. Answers in flight continue with these weights."""
        sampler, path = learner.sampler(), folder / str(learner.version)
        sampler.save_pretrained(path)
        comparison.remember(learner.version, sampler)
        await rb.fleet.update_weights(path, version=learner.version, mode="keep")
        shutil.rmtree(folder / str(learner.version - 1), ignore_errors=True)

    await publish()
    steps: list[Step] = []
    print(f"\nseed {seed}\nstep  reward  KL with replay  KL without   lag  mixed  dropped  seconds")
    async with asyncio.TaskGroup() as tasks:
        rolling = tasks.create_task(rollouts.run(rb))
        while len(steps) < num_steps:
            started = time.monotonic()
            groups = await rollouts.next()
            samples = [sample for group in groups for sample in group.samples]
            fresh = drop_stale(samples, version=learner.version, max_lag=MAX_WEIGHT_LAG)
            if not fresh:
                continue
            versions = [sample.weight_versions[sample.loss_mask] for sample in fresh]
            step = Step(
                seed=seed,
                step=len(steps),
                reward=float(np.concatenate([group.rewards for group in groups]).mean()),
                lag=learner.version - min(int(each.min()) for each in versions),
                mixed=float(np.mean([each.min() < each.max() for each in versions])),
                dropped=GROUPS_PER_STEP * GROUP - len(fresh),
                kl_with_replay=math.nan,
                kl_without_replay=math.nan,
                seconds=0.0,
            )
            await asyncio.to_thread(learner.step, fresh)
            await publish()
            step.kl_with_replay, step.kl_without_replay = await asyncio.to_thread(comparison.divergence, fresh)
            step.seconds = time.monotonic() - started
            steps.append(step)
            line = {name: None if math.isnan(value) else value for name, value in asdict(step).items()}
            print(json.dumps(line), file=log, flush=True)
            print(
                f"{step.step:4}  {step.reward:6.3f}  {step.kl_with_replay:14.1e}  {step.kl_without_replay:10.1e}  "
                f"{step.lag:4}  {step.mixed:5.0%}  {step.dropped:7}  {step.seconds:7.2f}",
                flush=True,
            )
        rolling.cancel()
    return steps


def summarize(runs: list[list[Step]]) -> list[str]:
    """Print the results of each seed. Return the failed expectations."""
    problems = []
    print("\nseed  reward, first    last   ratio  KL with replay  KL without  steps where it is lower with replay")
    for steps in runs:
        seed, rewards = steps[0].seed, [step.reward for step in steps]
        # Compare the first and the last ten steps. With fewer than 20 steps, compare the two halves.
        span = min(10, (len(steps) + 1) // 2)
        first, last = float(np.mean(rewards[:span])), float(np.mean(rewards[-span:]))
        both = [(step.kl_with_replay, step.kl_without_replay) for step in steps if not math.isnan(step.kl_with_replay)]
        with_replay, without = np.mean(both or [(math.nan, math.nan)], axis=0)
        ratio, lower = last / first if first else math.nan, sum(replayed < free for replayed, free in both)
        print(
            f"{seed:4}  {first:13.3f}  {last:6.3f}  {ratio:6.2f}  {with_replay:14.1e}  {without:10.1e}  "
            f"{lower} of {len(both)}"
        )
        if len(steps) >= MIN_LEARNING_STEPS and (last == 0 or last < 1.5 * first):
            problems.append(f"seed {seed}: the mean reward has not risen by half")
        if both and not with_replay < without:
            problems.append(f"seed {seed}: replay has not brought sampler and trainer closer")
    return problems


def plot(runs: list[list[Step]], path: Path) -> None:
    """Plot rewards and both divergences over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for steps in runs:
        seed, x = steps[0].seed, [step.step for step in steps]
        left.plot(x, [step.reward for step in steps], label=f"seed {seed}")
        for name, style in (("kl_with_replay", "-"), ("kl_without_replay", ":")):
            label = f"seed {seed}, {'with' if style == '-' else 'without'} replay"
            right.plot(x, [getattr(step, name) for step in steps], style, color=f"C{seed}", label=label)
    left.set(xlabel="step", ylabel="mean reward", ylim=(0, None))
    right.set(xlabel="step", ylabel="KL(sampler || trainer), bfloat16", yscale="log")
    left.legend()
    right.legend(fontsize="x-small")
    figure.savefig(path)


@asynccontextmanager
async def fleet(num_workers: int, folder: Path, output: Path) -> AsyncIterator[rollbus.Client]:
    """Run NATS and vLLM workers with a random policy. Yield a client when the workers serve."""
    first = folder / "0"
    Learner(seed=0, version=0).sampler().save_pretrained(first)
    engine_args = {"dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 16, "skip_tokenizer_init": True}
    async with EmbeddedServer() as server, AsyncExitStack() as stack:
        command = [sys.executable, "-P", "-m", "rollbus.workers", "--nats", server.url, "--served-model-name", "policy"]
        options = ["--model", str(first), "--weight-root", str(folder), "--engine-args", json.dumps(engine_args)]
        for name in (f"worker-{i}" for i in range(num_workers)):
            log = stack.enter_context((output / f"{name}.log").open("wb"))
            await stack.enter_async_context(process(*command, *options, "--worker-id", name, log=log))
        async with rollbus.connect(server.url) as rb:
            await rb.fleet.wait_for_workers(num_workers, timeout_s=START_TIMEOUT_S)
            yield rb


@asynccontextmanager
async def process(*command: str, log: BinaryIO) -> AsyncIterator[None]:
    """Run a program, and stop it at the end of the block."""
    running = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        yield
    finally:
        if running.returncode is None:
            running.terminate()
        await running.wait()


async def run(num_seeds: int, num_steps: int, num_workers: int, output: Path) -> bool:
    """Train with each seed, on the same workers. Return False if an expectation failed."""
    logging.disable_progress_bar()
    # The policy is tiny. Leave the cores to the samplers.
    torch.set_num_threads(1)
    print("vLLM workers start, which takes half a minute and more", flush=True)
    with tempfile.TemporaryDirectory() as name, (output / "log.jsonl").open("w") as log:
        folder = Path(name)
        async with fleet(num_workers, folder, output) as rb:
            # The versions of a seed follow those of the seed before.
            runs = [
                await learn(rb, seed, 1 + seed * (num_steps + 1), num_steps, folder, log) for seed in range(num_seeds)
            ]
    plot(runs, output / "learning.svg")
    problems = summarize(runs)
    print(f"\n{output}: log.jsonl, learning.svg, and the workers' logs")
    if num_steps < MIN_LEARNING_STEPS:
        print(f"The rise of rewards is checked only with {MIN_LEARNING_STEPS} steps or more; this run had {num_steps}.")
    for problem in problems:
        print(problem)
    return not problems


def positive(text: str) -> int:
    """Return a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=3, help="policies to train, in turn (default: 3)")
    parser.add_argument("--steps", type=positive, default=40, help="optimizer steps of each policy (default: 40)")
    parser.add_argument("--workers", type=positive, default=2, help="vLLM workers that sample (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("rl-output"), help="output folder (default: rl-output)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if asyncio.run(run(arguments.seeds, arguments.steps, arguments.workers, arguments.output)) else 1)
