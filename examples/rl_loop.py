"""Reinforcement learning of a tiny mixture of experts, with its rollouts over the bus; some minutes on two cores.

    python examples/rl_loop.py [--seeds 3] [--steps 60] [--output rl-output]

The policy, a Qwen3-MoE of 100,000 random parameters, learns to continue arithmetic progressions of digits (modulo ten)
by GRPO. A real vLLM worker samples; requests never stop: while the trainer makes a step, the worker goes on with the
weights that it has, and gets the new ones in the middle of its answers. Every token says which weights it came from,
and brings the experts that the sampler chose; the trainer computes with the same ones.

Prints, for each step, the mean reward, and the KL between sampler and trainer on the same tokens with the same
weights, both in bfloat16, with and without the sampler's experts. Writes log.jsonl, learning.svg and worker.log into
--output. The exit code is 0 only if the policies have learned and replay has brought sampler and trainer closer.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

import bus
from bus import ErrorCode, GenerateRequest, SamplingParams
from bus.embedded import EmbeddedServer
from trainer import MicroBatch, Sample, Stitcher, importance_weights, pack, replay, sampler_kl

NUM_DIGITS = 4
"""Of each answer."""
GROUP = 8
"""Answers to one prompt: each is rewarded relative to the others."""
GROUPS_PER_STEP = 32
MAX_WEIGHT_LAG = 2
"""Requests that have waited while the weights moved on by more are dropped."""
LEARNING_RATE = 5e-3
MAX_TOKENS = 4096
"""Of a micro-batch."""
START_TIMEOUT_S = 600.0
POLICY = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts=16,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    max_position_embeddings=64,
    initializer_range=0.1,
    tie_word_embeddings=False,
)


def reward(prompt: np.ndarray, token_ids: np.ndarray) -> float:
    """The share of digits that continue the progression of the prompt's two terms."""
    wanted = (prompt[1] + (prompt[1] - prompt[0]) * np.arange(1, NUM_DIGITS + 1)) % 10
    return float((token_ids == wanted).mean())


@dataclass
class Batch:
    """Answers for one step of the trainer."""

    samples: list[Sample] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_dropped: int = 0
    """Requests that waited until the weights had moved on too far."""


class Rollouts:
    """Answers to prompts without end: there are always requests under way, also while the trainer computes."""

    def __init__(self, rb: bus.Client, seed: int) -> None:
        self._prompts: dict[str, np.ndarray] = {}
        self._results = rb.complete_many(self._requests(seed), max_in_flight=2 * GROUPS_PER_STEP)

    def _requests(self, seed: int) -> Iterator[GenerateRequest]:
        rng = np.random.default_rng(seed)
        sampling = SamplingParams(max_tokens=NUM_DIGITS, temperature=1.0, n=GROUP, ignore_eos=True)
        while True:
            first, step = rng.integers(0, 10), rng.integers(1, 4)
            prompt = np.array([first, (first + step) % 10], np.int32)
            request = GenerateRequest(prompt_token_ids=prompt, sampling=sampling, max_weight_lag=MAX_WEIGHT_LAG)
            self._prompts[request.request_id] = prompt
            yield request

    async def next(self) -> Batch:
        """The next groups that finish; an answer's advantage is its reward measured by those of its group."""
        batch = Batch()
        num_groups = 0
        async for generation in self._results:
            prompt = self._prompts.pop(generation.request_id)
            if generation.error is not None:
                if generation.error.code is not ErrorCode.TOO_STALE:
                    raise generation.error
                batch.num_dropped += 1
                continue
            answers = (generation, *generation.siblings)
            rewards = np.array([reward(prompt, answer.token_ids) for answer in answers])
            for answer, advantage in zip(answers, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
                stitcher = Stitcher()
                stitcher.add(prompt, answer)
                batch.samples.append(stitcher.sample(advantage=float(advantage)))
            batch.rewards.extend(rewards)
            num_groups += 1
            if num_groups == GROUPS_PER_STEP:
                break
        return batch

    async def close(self) -> None:
        """Abort what is open."""
        await self._results.aclose()


class Learner:
    """The policy in float32, and what the sampler has of it: bfloat16, as saved for each version.

    Attributes:
        version: of the present weights.
    """

    def __init__(self, seed: int, version: int) -> None:
        torch.manual_seed(seed)
        self._model = Qwen3MoeForCausalLM(POLICY)
        self._twin = Qwen3MoeForCausalLM(POLICY).to(torch.bfloat16).eval()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self._saved: dict[int, dict[str, torch.Tensor]] = {}
        self.version = version

    def save(self, folder: Path) -> Path:
        """Write the present weights as a checkpoint, in bfloat16."""
        path = folder / str(self.version)
        self._twin.load_state_dict(self._model.state_dict())
        self._twin.save_pretrained(path)
        weights = {name: tensor.clone() for name, tensor in self._twin.state_dict().items()}
        self._saved = {**self._saved, self.version: weights}
        for version in sorted(self._saved)[: -MAX_WEIGHT_LAG - 2]:
            del self._saved[version]
        return path

    def step(self, samples: list[Sample]) -> None:
        """One step of GRPO with the sampler's experts; each token's weight makes up for the sampler's older policy."""
        self._model.train()
        batches = pack(samples, max_tokens=MAX_TOKENS)
        num_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        for batch in batches:
            with replay(self._model, batch.routed_experts):
                logprobs = logprobs_of(self._model, batch)
                weights = importance_weights(logprobs, batch.sampler_logprobs, batch.loss_mask)
                loss = -(batch.advantages * weights * logprobs)[batch.loss_mask].sum() / num_tokens
                loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1

    @torch.no_grad()
    def divergence(self, samples: list[Sample]) -> tuple[float, float]:
        """KL of sampler and trainer with replay, and without: both in bfloat16, with the weights of a token's version.

        Answers whose tokens are of two versions are left out: their first tokens' keys and values are of the older one.
        """
        sums, num_tokens = np.zeros(2), 0
        for version, weights in self._saved.items():
            own = [sample for sample in samples if (sample.weight_versions[sample.loss_mask] == version).all()]
            if not own:
                continue
            self._twin.load_state_dict(weights)
            for batch in pack(own, max_tokens=MAX_TOKENS):
                with replay(self._twin, batch.routed_experts):
                    replayed = logprobs_of(self._twin, batch)
                free = logprobs_of(self._twin, batch)
                count = int(batch.loss_mask.sum())
                for index, logprobs in enumerate((replayed, free)):
                    sums[index] += count * float(sampler_kl(logprobs, batch.sampler_logprobs, batch.loss_mask))
                num_tokens += count
        with_replay, without = sums / max(num_tokens, 1)
        return with_replay, without


def logprobs_of(model: Qwen3MoeForCausalLM, batch: MicroBatch) -> torch.Tensor:
    """What `model` gives each target: f32[1, T]."""
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
    """Of the oldest token's weights behind the trainer's."""
    num_dropped: int
    seconds: float


async def learn(rb: bus.Client, seed: int, version: int, num_steps: int, folder: Path, log: TextIO) -> list[Step]:
    """Train one policy, from random weights on."""
    learner = Learner(seed, version)
    await rb.fleet.update_weights(learner.save(folder), version=learner.version, mode="abort")
    rollouts = Rollouts(rb, seed)
    steps: list[Step] = []
    print(f"\nseed {seed}\nstep  reward  KL with replay  KL without   lag  dropped  seconds")
    try:
        while len(steps) < num_steps:
            started = time.monotonic()
            batch = await rollouts.next()
            oldest = min(int(sample.weight_versions[sample.loss_mask].min()) for sample in batch.samples)
            lag, reward = learner.version - oldest, float(np.mean(batch.rewards))
            divergence = learner.divergence(batch.samples)
            learner.step(batch.samples)
            # The worker has answers under way: their next tokens come from these weights.
            await rb.fleet.update_weights(learner.save(folder), version=learner.version, mode="keep")
            seconds = time.monotonic() - started
            step = Step(seed, len(steps), reward, *divergence, lag, batch.num_dropped, seconds)
            steps.append(step)
            print(json.dumps(asdict(step)), file=log, flush=True)
            print(
                f"{step.step:4}  {step.reward:6.3f}  {step.kl_with_replay:14.1e}  {step.kl_without_replay:10.1e}  "
                f"{step.lag:4}  {step.num_dropped:7}  {step.seconds:7.2f}",
                flush=True,
            )
    finally:
        await rollouts.close()
    return steps


def summarize(runs: list[list[Step]]) -> bool:
    """Say what came of it; False: not what was promised."""
    is_good = True
    print("\nseed  reward, first 10  last 10   ratio  KL with replay  KL without")
    for steps in runs:
        first, last = (float(np.mean([step.reward for step in part])) for part in (steps[:10], steps[-10:]))
        with_replay = float(np.mean([step.kl_with_replay for step in steps]))
        without = float(np.mean([step.kl_without_replay for step in steps]))
        ratio = last / first
        print(f"{steps[0].seed:4}  {first:16.3f}  {last:7.3f}  {ratio:6.2f}  {with_replay:14.1e}  {without:10.1e}")
        is_good = is_good and ratio >= 1.5 and with_replay < without
    return is_good


def plot(runs: list[list[Step]], path: Path) -> None:
    """Rewards, and both divergences, over the steps."""
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
async def fleet(folder: Path, output: Path) -> AsyncIterator[bus.Client]:
    """NATS and a vLLM worker with a random policy; yields a client once it serves."""
    first = Learner(seed=0, version=0).save(folder)
    engine_args = {"dtype": "bfloat16", "max_model_len": 64, "skip_tokenizer_init": True}
    async with EmbeddedServer() as server:
        command = [sys.executable, "-P", "-m", "workers", "--nats", server.url, "--served-model-name", "policy"]
        options = ["--model", str(first), "--weight-root", str(folder), "--engine-args", json.dumps(engine_args)]
        with (output / "worker.log").open("wb") as log:
            worker = await asyncio.create_subprocess_exec(*command, *options, stdout=log, stderr=log)
        try:
            async with bus.connect(server.url) as rb:
                await rb.fleet.wait_for_workers(timeout_s=START_TIMEOUT_S)
                yield rb
        finally:
            if worker.returncode is None:
                worker.terminate()
            await worker.wait()


async def run(num_seeds: int, num_steps: int, output: Path) -> bool:
    """Train with each seed, on the same worker; False: it did not go as promised."""
    logging.disable_progress_bar()
    print("A vLLM worker starts, which takes half a minute and more", flush=True)
    with tempfile.TemporaryDirectory() as name, (output / "log.jsonl").open("w") as log:
        folder = Path(name)
        async with fleet(folder, output) as rb:
            # Each seed's versions come after those of the last.
            runs = [
                await learn(rb, seed, 1 + seed * (num_steps + 1), num_steps, folder, log) for seed in range(num_seeds)
            ]
    plot(runs, output / "learning.svg")
    is_good = summarize(runs)
    print(f"\n{output}: log.jsonl, learning.svg, worker.log")
    if not is_good:
        print("Rewards should rise by half, and replay bring sampler and trainer closer: for some seed they did not.")
    return is_good


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=3, help="policies to train, one after the other (3)")
    parser.add_argument("--steps", type=positive, default=60, help="of each (60)")
    parser.add_argument("--output", type=Path, default=Path("rl-output"), help="folder for what is written (rl-output)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if asyncio.run(run(arguments.seeds, arguments.steps, arguments.output)) else 1)
