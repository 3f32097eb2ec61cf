"""verl's own server manager, clients, agent loop and checkpoint manager with a fleet; prints JSON results.

python rollouts.py URL FLEET CHECKPOINT abort|keep WORKER

Prints `sampling` when the worker has requests, so that the test kills it.
"""

import contextlib
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.experimental.agent_loop import AgentLoopManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

sys.path.insert(0, str(Path(__file__).parent))
from common import PROMPTS, Actor, make_config, start_ray

import rollbus.sync
from rollbus.schemas.errors import InvalidRequest

url, fleet, checkpoint = sys.argv[1:4]
mode, doomed = sys.argv[4:6]
COUNT = 96
seen = {"batches": [], "difference": 0.0, "wrong_rows": 0, "rows": 0, "samples": 0, "errors": []}
torch.set_num_threads(1)


def batch_of(number, validate=False):
    """Return a batch of prompts as verl's trainer makes it."""
    raw = np.empty(number, dtype=object)
    raw[:] = [[{"role": "user", "content": f"{PROMPTS[i % len(PROMPTS)]} {i}"}] for i in range(number)]
    return DataProto.from_dict(
        tensors={"dummy": torch.zeros(number, 1)},
        non_tensors={"raw_prompt": raw, "index": np.arange(number)},
        meta_info={"validate": validate, "global_steps": 0},
    )


def in_flight(fleet, name=None):
    """Wait until this worker, or any worker, has requests. Return their number."""
    for _ in range(400):
        found = fleet.requests("running", workers=None if name is None else [name], limit=256)
        if found.timelines:
            return len(found.timelines)
        time.sleep(0.05)
    raise TimeoutError(f"{name or 'any worker'} has no requests: {found}, {fleet.workers}")


def announce():
    """Tell the test when the worker that it kills has requests."""
    seen["killed_with"] = in_flight(watch.fleet, doomed)
    print("sampling", flush=True)


def forward(ids, state, top):
    """Return the experts of each position, sorted, and the log probability of each token after the first."""
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        found = model(ids[None], output_router_logits=True)
    chosen = torch.stack([logits.topk(top).indices for logits in found.router_logits], dim=1)
    logprobs = found.logits[0, :-1].float().log_softmax(-1)
    return chosen[:-1].sort(-1).values, logprobs.gather(1, ids[1:, None])[:, 0]


def compare(output, states):
    """Compare rows and log probabilities of each sample with forward passes of transformers.

    In a sample of two versions, positions before some token are of the first version, and all others of the second.
    """
    batch, extra = output.batch, output.non_tensor_batch
    width = batch["prompts"].shape[1]
    steps = []
    for i in range(len(output)):
        mask = batch["attention_mask"][i].bool()
        ids = batch["input_ids"][i][mask]
        num_prompt = int(mask[:width].sum())
        low, high = int(extra["min_global_steps"][i]), int(extra["max_global_steps"][i])
        steps.append([low, high])
        rows = batch["routed_experts"][i][mask]
        assert rows.dtype == torch.int16
        assert not rows[-1].any(), "verl's own padding: the last token has no row"
        rows = rows[:-1].long().sort(-1).values
        sampled = batch["rollout_log_probs"][i][: len(ids) - num_prompt]
        parts = []
        for step in sorted({low, high}):
            own, logprobs = forward(ids, states[step], rows.shape[-1])
            wrong = (own != rows).any(-1).any(-1)
            difference = (logprobs[num_prompt - 1 :] - sampled).abs()
            bad = wrong.clone()
            bad[num_prompt - 1 :] |= difference > 1e-3
            parts.append((wrong, difference, bad))
        ends = range(num_prompt, len(rows)) if low != high else [len(rows)]
        end = min(ends, key=lambda at: int(parts[0][2][:at].sum() + parts[-1][2][at:].sum()))
        seen["wrong_rows"] += int(parts[0][0][:end].sum() + parts[-1][0][end:].sum())
        at = end - num_prompt + 1
        difference = torch.cat([parts[0][1][:at], parts[-1][1][at:]])
        seen["difference"] = max(seen["difference"], float(difference.max()))
        seen["rows"] += len(rows)
        seen["samples"] += 1
    seen["batches"].append({"steps": sorted(map(list, set(map(tuple, steps))))})
    return steps


def keys_of(model_, tensors):
    """Return tensors under the names of the model in memory: transformers 5 holds all experts of a layer in one."""
    state = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    number = model_.config.num_experts
    for layer in range(model_.config.num_hidden_layers):
        at = f"model.layers.{layer}.mlp.experts"
        one = [
            {part: tensors[f"{at}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")} for e in range(number)
        ]
        state[f"{at}.gate_up_proj"] = torch.stack([torch.cat([found["gate"], found["up"]]) for found in one])
        state[f"{at}.down_proj"] = torch.stack([found["down"] for found in one])
    missing = set(model_.state_dict()) - state.keys()
    assert not missing, missing
    return state


start_ray()
with rollbus.sync.connect(url, fleet=fleet) as watch, contextlib.ExitStack() as stack:
    stack.callback(ray.shutdown)
    config = make_config(url, fleet, checkpoint, f"+actor_rollout_ref.rollout.engine_kwargs.rollbus.update={mode}")
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    manager = LLMServerManager.create(config=config)
    client = manager.get_client(client_cls=FullyAsyncLLMServerClient)
    loops = AgentLoopManager.create(config=config, llm_client=client)
    actors = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Actor), rollout=rollout, folder=checkpoint),
        use_gpu=False,
    )
    updates = CheckpointEngineManager(
        config=rollout.checkpoint_engine, actor_wg=actors, replicas=manager.get_replicas()
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    states = {0: keys_of(model, actors.state()[0])}
    updates.update_weights(0)

    # 1. a batch, in which the test kills a worker
    threading.Thread(target=announce, daemon=True).start()
    compare(loops.generate_sequences(batch_of(COUNT)), states)

    # 2. new weights in the middle of a batch
    actors.change(1.1)
    states[1] = keys_of(model, actors.state()[0])
    batch = batch_of(COUNT)
    running = [worker.generate_sequences.remote(batch) for worker in loops.agent_loop_workers]
    in_flight(watch.fleet)
    time.sleep(0.3)  # some tokens of the old weights
    seen["sync"] = updates.update_weights(1)
    spanned = compare(ray.get(running[0]), states)
    seen["spanned"] = sum(low != high for low, high in spanned)
    seen["after"] = sum(low == 1 for low, _ in spanned)

    # 3. validation is greedy: two runs are equal
    first, second = (loops.generate_sequences(batch_of(8, validate=True)) for _ in range(2))
    compare(first, states)
    seen["greedy"] = bool((first.batch["responses"] == second.batch["responses"]).all())

    # a trainer that shares its GPUs with the rollout is rejected
    try:
        LLMServerManager.create(config=config, worker_group=actors)
    except InvalidRequest as error:
        seen["hybrid"] = str(error)

    # 4. a trainer that fails while it sends: the old weights serve on, and the error says why
    actors.change(1.2, breaks=True)
    try:
        updates.update_weights(2)
    except Exception as error:  # noqa: BLE001 - what Ray makes of it is the point
        seen["errors"].append(str(error)[-2000:])
    steps = compare(loops.generate_sequences(batch_of(8)), states)
    seen["after_failure"] = sorted(set(map(tuple, steps)))

    # 5. late and repeated announcements of an update have no effect
    server = manager.get_replicas()[0].server_handle
    ray.get([server.commit_update.remote("late", 1, "none", 1) for _ in range(2)])
    ray.get(server.fail_update.remote("late", "the trainer was late"))
    ray.get(server.fail_update.remote("later", "the trainer was late"))
    actors.change(1.2)
    states[3] = keys_of(model, actors.state()[0])
    updates.update_weights(3)
    seen["after_repair"] = sorted(set(map(tuple, compare(loops.generate_sequences(batch_of(8)), states))))
    print("seen " + json.dumps(seen), flush=True)
