"""Program for the trainers' Python: AReaL's remote vLLM engine and its RLVR workflow, unchanged.

python areal_engine.py ADDRESS TOKENIZER CHECKPOINT SETTINGS

The order of the calls is that of a step of its `PPOTrainer` (trainer/rl_trainer.py) and of
`FSDPEngine._update_weights_from_disk`, whose own code needs a GPU: pause, save, update, continue, next version.
"""

import json
import os
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path

from areal.api import WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.utils import name_resolve, names
from areal.workflow.rlvr import RLVRWorkflow


def reward(prompt, completion, prompt_ids, completion_ids, **_):
    """Return the share of even token ids."""
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)


def plain(trajectory):
    """Return a trajectory of one sample as JSON types."""
    return {name: value[0].tolist() for name, value in trajectory.items()}


def main(address, tokenizer, checkpoint, settings):
    """Run a batch before, one across, and one after an update, with a killed server process in the second."""
    os.environ["AREAL_LLM_SERVER_ADDRS"] = address
    root = Path(settings["root"])
    name_resolve.reconfigure(NameResolveConfig(nfs_record_root=str(root / "names")))
    config = InferenceEngineConfig(
        experiment_name="gateways", trial_name=settings["trial"], fileroot=str(root), tokenizer_path=tokenizer,
        backend="vllm:d1", max_concurrent_rollouts=16, consumer_batch_size=4, max_head_offpolicyness=1000,
        setup_timeout=120, request_retries=3,
    )  # fmt: skip
    engine = RemotevLLMEngine(config)
    engine.initialize(train_data_parallel_size=1)

    def workflow(max_new_tokens):
        sampling = GenerationHyperparameters(max_new_tokens=max_new_tokens, ignore_eos=True, temperature=1.0)
        return RLVRWorkflow(reward, sampling, tokenizer)

    data = [{"messages": [{"role": "user", "content": f"What is {seed} plus {seed}?"}]} for seed in settings["seeds"]]
    before = engine.rollout_batch(data[:4], workflow(16))
    long = workflow(settings["long"])
    for each in data:
        engine.submit(each, long)
    print("submitted", flush=True)
    while not (root / "go").exists():
        time.sleep(0.05)

    engine.pause()
    meta = WeightUpdateMeta.from_disk("gateways", settings["trial"], str(root)).with_version(1)
    engine.pause_generation()
    done = engine.update_weights_from_disk(meta)
    shutil.copytree(checkpoint, meta.path, dirs_exist_ok=True)
    name = names.update_weights_from_disk("gateways", settings["trial"], engine.get_version())
    name_resolve.add(name, str(datetime.now().timestamp()), keepalive_ttl=120)
    done.result()
    engine.continue_generation()
    engine.set_version(1)
    engine.resume()

    across = engine.wait(len(data), timeout=settings["timeout_s"])
    after = engine.rollout_batch(data[:4], workflow(16))
    scores = engine.compute_logp(after)
    engine.destroy()
    seen = {"before": before, "across": across, "after": after}
    seen = {name: [plain(each) for each in found] for name, found in seen.items()}
    seen["scores"] = [each[0].tolist() for each in scores]
    seen["is_kept"] = Path(meta.path).exists()
    print("seen", json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
