"""A coding agent learns to write a function: groups of sessions, policy gradients, router replay, new weights.

Each session has its own directory. In each turn the agent sends its history to the session's URL with the unchanged
`openai` client, and runs the model's answer as a shell command: it writes a file, runs the tests, or exits. The reward
is the share of the tests that pass at the end. The service keeps the sampled tokens, so nothing is tokenized here.

The tiny model of `rollbus up` has random weights and cannot write code. So each request has a grammar with the eight
commands in COMMANDS, and the model learns which of them to run. The sampler's log probabilities are those under the
grammar, so the trainer applies the same grammar. For a model that writes code, remove both.

Run it on the workers' machine, with the Python that has rollbus and `openai`. Five steps take a minute on two CPU
cores:

    rollbus up                # in another terminal: NATS, a worker, and the HTTP service
    python coding_agent.py    # --nats URL, --http URL, if `rollbus up` prints other addresses
"""

import argparse
import asyncio
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollbus
from rollbus.integrations.sessions import run_group
from rollbus.trainer import importance_weights, pack, replay, sampler_kl
from rollbus.trainer.checkpoint import checkpoint_tensors

TASKS = {
    "Write f(a, b), the sum of a and b, into f.py.": [(2, 3, 5), (4, 1, 5), (2, 2, 4), (7, 0, 7)],
    "Write f(a, b), which is a plus b, into f.py.": [(1, 1, 2), (5, 2, 7), (0, 3, 3), (2, 2, 4)],
}
"""Questions, each with its tests: two arguments and the result."""
GROUP = 8
"""Sessions of one question. The advantage of a session is relative to the others of its group."""
GROUPS_PER_STEP = 4
MAX_TURNS = 4
COMMANDS = [*[f"echo 'f=lambda a,b:a{op}b'>f.py" for op in ("+", "-", "*", "//", "**", "%")], "python test.py", "exit"]
TEST = "from f import f\nprint(sum(f(a, b) == result for a, b, result in {tests}), 'of {count} tests pass')\n"
SHELL = 'ulimit -t 5 && ulimit -f 64 && ulimit -v 1000000 && exec timeout -s KILL 10 sh -c "$1" >output 2>&1'
"""Bounds of a command: 5 s of CPU time, files of 64 blocks, 1 GB of memory, 10 s. It can still read other files and use
the network. Run commands of a model without a grammar in a container."""
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "PYTHONDONTWRITEBYTECODE": "1"}


def run_command(folder: Path, command: str) -> str:
    """Run a shell command in a directory. Return the end of its output."""
    shell = ["sh", "-c", SHELL, "sh", command]
    subprocess.run(shell, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, check=False)
    return (folder / "output").read_text(errors="replace")[-200:].strip()


async def solve(agent: openai.AsyncOpenAI, model: str, question: str) -> float:
    """Let the model run commands until it exits. Return the reward."""
    tests = TASKS[question]
    messages = [{"role": "user", "content": f"{question} Answer with one shell command."}]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test.py").write_text(TEST.format(tests=tests, count=len(tests)))
        for _ in range(MAX_TURNS):
            answer = await agent.chat.completions.create(
                model=model,
                messages=messages,
                temperature=1.0,
                max_tokens=64,
                extra_body={"structured_outputs": {"choice": COMMANDS}},
            )
            command = answer.choices[0].message.content
            if command == "exit":
                break
            output = await asyncio.to_thread(run_command, folder, command)
            messages += [{"role": "assistant", "content": command}, {"role": "user", "content": f"Output: {output}"}]
        (folder / "test.py").write_text(TEST.format(tests=tests, count=len(tests)))  # a command may have changed it
        passed = (await asyncio.to_thread(run_command, folder, "python test.py")).removesuffix(" tests pass").split()
    return int(passed[0]) / len(tests) if passed[1:2] == ["of"] else 0.0


class Grammar:
    """The tokens that may follow the beginning of an answer: each continues a command or ends a whole one."""

    def __init__(self, tokenizer, commands: list[str]) -> None:
        self._texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
        self._end = tokenizer.eos_token_id
        self._commands = commands
        self.allowed = functools.cache(self._allowed)

    def _allowed(self, answer: str) -> list[bool]:
        left = [command[len(answer) :] for command in self._commands if command.startswith(answer)]
        return [
            "" in left if token == self._end else bool(text) and any(each.startswith(text) for each in left)
            for token, text in enumerate(self._texts)
        ]

    def apply(self, logits: torch.Tensor, batch) -> torch.Tensor:
        """Return f32[1, T, vocabulary] with -inf for each token that the sampler could not choose."""
        allowed, answer = np.ones(logits.shape[1:], np.bool_), ""
        trained = batch.loss_mask[0].tolist()
        for position, target in enumerate(batch.target_ids[0].tolist()):
            if not trained[position]:
                answer = ""
                continue
            allowed[position] = self.allowed(answer)
            answer += self._texts[target]
        return logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)


def train(model, optimizer, samples, grammar: Grammar) -> float:
    """Make one optimizer step with the sampler's experts. Return the divergence of sampler and trainer before it."""
    batches = pack(samples, max_tokens=4096)
    num_trained, divergence = sum(int(batch.loss_mask.sum()) for batch in batches), 0.0
    for batch in batches:
        with replay(model, batch.routed_experts):
            logits = grammar.apply(model(**batch.model_inputs()).logits.float(), batch)
            logprobs = logits.log_softmax(-1).gather(-1, batch.target_ids[..., None])[..., 0]
            weights = importance_weights(logprobs, batch.sampler_logprobs, batch.loss_mask)
            loss = -(weights * batch.advantages * logprobs)[batch.loss_mask].sum() / num_trained
            loss.backward()
        kl = float(sampler_kl(logprobs, batch.sampler_logprobs, batch.loss_mask))
        divergence += kl * int(batch.loss_mask.sum()) / num_trained
    optimizer.step()
    optimizer.zero_grad()
    return divergence


async def main(nats: str | None, http: str, num_steps: int) -> None:
    """Train the model that the fleet serves."""
    torch.set_num_threads(1)  # the tiny model needs no more; the workers need the other cores
    token = os.environ.get("ROLLBUS_HTTP_TOKEN")
    async with rollbus.connect(nats) as rb, openai.AsyncOpenAI(base_url=http, api_key="none") as client:
        await rb.fleet.wait_for_workers()
        worker = next(worker for worker in rb.fleet.workers if worker.state == "serving")
        folder, dtype = worker.model_path, getattr(torch, worker.capabilities.dtype)
        grammar = Grammar(AutoTokenizer.from_pretrained(folder), COMMANDS)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
        async with rollbus.WeightPublisher(rb, model=worker.model, checkpoint=folder) as publisher:

            async def publish(version: int) -> None:
                """Publish the current weights to all workers, in the dtype in which they compute."""
                tensors = ((name, tensor.to(dtype)) for name, tensor in checkpoint_tensors(model))
                await publisher.publish(tensors, version=version)

            async def run_agents(question: str):
                """Run a group of sessions. Return their samples, each with its advantage."""

                async def agent(session) -> float:
                    own = client.with_options(base_url=session.url, api_key=session.api_key)
                    return await solve(own, worker.model, question)

                limits = {"routed_experts": True, "max_turns": MAX_TURNS, "retention_s": 60.0}
                return await run_group(http, agent, n=GROUP, token=token, **limits)

            version = worker.weight_version + 1
            await publish(version)  # the fleet may have the weights of an earlier run
            questions = [*TASKS] * GROUPS_PER_STEP
            for step in range(num_steps):
                async with asyncio.TaskGroup() as tasks:
                    groups = [tasks.create_task(run_agents(each)) for each in questions[:GROUPS_PER_STEP]]
                found = [each for group in groups for each in group.result()]
                divergence = train(model, optimizer, [each.sample for each in found], grammar)
                await publish(version := version + 1)
                mean = f"mean reward of {len(found)} sessions {np.mean([each.reward for each in found]):.3f}"
                turns = np.mean([len(each.details["turns"]) for each in found])
                print(f"step {step + 1}: {mean}, {turns:.1f} turns, KL {divergence:.0e}; weights are now {version}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", help="address of the NATS server (default: $ROLLBUS_NATS, else port 4222 here)")
    parser.add_argument("--http", default="http://127.0.0.1:8080", help="address of the service (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (default: 5)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not 1 or more")
    asyncio.run(main(arguments.nats, arguments.http, arguments.steps))
