"""Program for the trainers' Python: the calls of `AsyncGRPOTrainer` in its order, with its queue and samples.

The program does not use that trainer itself, because its constructor needs CUDA: it queries the name of the GPU.

python trl_async.py URL FLEET MODEL_FOLDER ROUNDS
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

from rollbus import SamplingParams
from rollbus.integrations.trl import RolloutWorker, WeightTransfer

GROUP, GROUPS_PER_ROUND, MAX_STALENESS = 4, 4, 3
WANTED = 200


def share_of_wanted(completion_ids, level, **_):
    """Return the share of a completion's tokens that are rewarded."""
    assert level == ["easy"] * GROUP
    return [sum(token < WANTED for token in ids) / len(ids) for ids in completion_ids]


async def always_none(completions, **_):
    """Return no rewards, so that this function does not count."""
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [None] * len(completions)


def logprobs_of(model, ids):
    """Return f32[T - 1], the model's log probability of each token but the first."""
    logits = model(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


url, fleet, folder, rounds = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
transfer = WeightTransfer(url, fleet=fleet, model="policy", checkpoint=folder)
worker = RolloutWorker(
    url,
    fleet=fleet,
    model="policy",
    dataset=[{"prompt": [{"role": "user", "content": text}], "level": "easy"} for text in ("one", "two and two")],
    reward_funcs=[share_of_wanted, always_none],
    tokenizer=tokenizer,
    sampling=SamplingParams(max_tokens=8),
    num_generations=GROUP,
    max_groups=4,
    queue_size=2 * GROUP,
    transfer=transfer,
)
metrics = defaultdict(list)
seen = {"version": 0, "stored": [], "staleness": [], "rewards": [], "difference": 0.0}


def sync_weights():
    """Publish the weights as the trainer does."""
    transfer.pause()
    transfer.send_weights(iter(list(model.named_parameters())))
    transfer.resume()
    seen["version"] += 1
    worker.update_model_version(seen["version"])
    last = transfer.last
    seen["stored"].append(last.stored_bytes / last.model_bytes)


transfer.init_weight_transfer()
sync_weights()
worker.start()
# The queue logs a long wait through accelerate.
PartialState()
samples = iter(
    RolloutQueueDataset(
        worker.rollout_buffer, lambda: seen["version"], worker.check_health, 120.0, metrics, MAX_STALENESS, 1.0
    )
)
for _ in range(rounds):
    loss, groups, rewards = torch.zeros(()), defaultdict(int), []
    while len(groups) < GROUPS_PER_ROUND:
        sample = next(samples)
        ids, mask = torch.tensor(sample["input_ids"]), torch.tensor(sample["completion_mask"])
        assert len(ids) == len(mask) == len(sample["old_log_probs"])
        assert (int(mask[0]), int(mask[-1])) == (0, 1)
        assert not sample["old_log_probs"][: int((mask == 0).sum())].any()
        own = logprobs_of(model, ids)[mask[1:] == 1]
        sampled = torch.tensor(sample["old_log_probs"])[mask == 1]
        if seen["version"] == 1:
            seen["difference"] = max(seen["difference"], float((own - sampled).abs().max()))
        loss = loss - sample["advantage"] * own.sum()
        groups[sample["group_id"]] += 1
        rewards.append(sample["metrics"]["reward"])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    seen["rewards"].append(sum(rewards) / len(rewards))
    sync_weights()
seen["staleness"] = metrics["sample/staleness_max"]
seen["dropped"] = len(metrics["sample/dropped_stale_total"])
seen["lengths"] = worker.metrics_queue.qsize()
worker.stop()
worker.stop()
transfer.destroy()
print("seen " + json.dumps(seen), flush=True)
