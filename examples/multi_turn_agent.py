"""Conversations with a tool: each becomes one sample to train on, with the routed experts of all its turns.

The model calls `add(a, b)` twice, reads the results and answers. Each turn's prompt is the token ids so far, so no text
is tokenized twice. `session_id` sends the turns of a conversation to the worker that has the earlier turns in its
prefix cache. `routed_experts_prompt_start=stitcher.next_start` requests only the rows that are missing.

Run it on the workers' machine, with the Python that has rollbus. It takes some seconds:

    rollbus up                    # in another terminal: NATS and a worker
    python multi_turn_agent.py    # --nats URL, if `rollbus up` prints another address than nats://127.0.0.1:4222
"""

import argparse
import asyncio
import re
import uuid

from transformers import AutoTokenizer

import rollbus
from rollbus.trainer import Stitcher, group_advantages, pack

QUESTION = """Find two numbers with a large sum, both from 0 to 999. You have one tool, and may use it twice.
add(a, b) returns the sum of a and b. To call it, write the call and nothing else, as in add(12, 30). The next message
is what the tool returned. When you are done, write your answer in one sentence: the two numbers, and what they add up
to. Do not compute the sum yourself, and do not explain how you chose the numbers."""
NUM_CALLS = 2
GROUP = 4
TOOL_CALL = r"add\(([0-9]{1,3}), ([0-9]{1,3})\)"
# An untrained model calls no tool, so a grammar forces the call. To train a model that calls tools, leave `extra` out:
# with a grammar, the log probabilities are those under the grammar.
CALL = rollbus.SamplingParams(max_tokens=24, extra={"structured_outputs": {"regex": TOOL_CALL}})
ANSWER = rollbus.SamplingParams(max_tokens=24)


async def converse(rb: rollbus.Client, tokenizer) -> tuple[Stitcher, float]:
    """Run one conversation. Return its turns, and a reward of up to 1: the largest sum, divided by 1998."""
    stitcher, session, reward = Stitcher(), uuid.uuid4().hex, 0.0
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for turn in range(NUM_CALLS + 1):
        request = rollbus.GenerateRequest(
            prompt_token_ids=prompt,
            sampling=CALL if turn < NUM_CALLS else ANSWER,
            session_id=session,
            routed_experts_prompt_start=stitcher.next_start,
        )
        generation = await rb.complete(request)
        stitcher.add(prompt, generation)
        text = tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        call = re.fullmatch(TOOL_CALL, text)
        known = f"{generation.cached_tokens} of {len(prompt)} prompt tokens cached"
        print(f"  {session[:4]} turn {turn + 1}, {known}: {text!r}")
        if call is None:
            break
        result = int(call[1]) + int(call[2])
        reward = max(reward, result / 1998)
        # The text between two turns in the chat format of this model (ChatML).
        reply = f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
        prompt = [*prompt, *generation.token_ids.tolist(), *tokenizer.encode(reply, add_special_tokens=False)]
    return stitcher, reward


async def main(nats: str | None, num_steps: int) -> None:
    """Make the batches of some training steps, each of one group of conversations."""
    async with rollbus.connect(nats) as rb:
        await rb.fleet.wait_for_workers()
        worker = next(worker for worker in rb.fleet.workers if worker.state == "serving")
        tokenizer = AutoTokenizer.from_pretrained(worker.model_path)
        for step in range(num_steps):
            print(f"step {step + 1}")
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(converse(rb, tokenizer)) for _ in range(GROUP)]
            stitchers, rewards = zip(*(task.result() for task in running), strict=True)
            advantages = group_advantages(rewards).tolist()
            samples = [each.sample(advantage=worth) for each, worth in zip(stitchers, advantages, strict=True)]
            print(f"  {len(samples)} conversations")
            for batch in pack(samples, max_tokens=4096):
                trained, rows = int(batch.loss_mask.sum()), tuple(batch.routed_experts.shape)
                print(f"  a batch: {trained} tokens to train, experts {rows}")
            print("  rewards", [round(reward, 2) for reward in rewards])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", help="address of the NATS server (default: $ROLLBUS_NATS, else port 4222 here)")
    parser.add_argument("--steps", type=int, default=2, help="groups of conversations (default: 2)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not 1 or more")
    asyncio.run(main(arguments.nats, arguments.steps))
