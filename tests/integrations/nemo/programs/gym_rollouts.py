"""Program for NeMo Gym's Python: its environments, agent and `vllm_model`, unchanged. Prints the rollouts as JSON.

NeMo-RL uses the same two classes: `RunHelper` starts the servers, `RolloutCollectionHelper` the rollouts.

python gym_rollouts.py URL MODEL FOLDER SETTINGS
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import psutil
import ray
from nemo_gym import PARENT_DIR
from nemo_gym.cli.env import RunHelper
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import BaseServerConfig
from omegaconf import DictConfig

SERVERS = {
    "resources_servers": None,
    "responses_api_agents": ["simple_agent"],
    "responses_api_models": ["vllm_model"],
    "environment_servers": ["legacy_agent"],
}
"""Kinds of servers. Each is started with a Python environment of its own; here all are this environment."""


def own_environments(folder, environments):
    """Return a folder for NeMo Gym's option `uv_venv_dir`: each server has the environment of this program."""
    for kind, names in SERVERS.items():
        for name in names or environments:
            (folder / kind / name).mkdir(parents=True)
            (folder / kind / name / ".venv").symlink_to(sys.prefix)
    return folder


def config_of(url, model, folder, settings):
    """Return the configuration: published files of NeMo Gym, and what a user writes."""
    environments = settings["environments"]
    paths = [f"resources_servers/{name}/configs/{name}.yaml" for name in environments]
    agents = {
        f"{name}_simple_agent": {"responses_api_agents": {"simple_agent": {"max_steps": settings["turns"]}}}
        for name in environments
    }
    return {
        "config_paths": [*paths, "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"],
        "policy_base_url": f"{url}/v1",
        "policy_api_key": "none",
        "policy_model_name": model,
        "policy_model": {"responses_api_models": {"vllm_model": settings["model"]}},
        **agents,
        "uv_venv_dir": str(own_environments(folder / "venvs", environments)),
        "skip_venv_if_present": True,
        "ray_head_node_address": ray.get_runtime_context().gcs_address,
        "default_host": "127.0.0.1",
        "head_server": {"host": "127.0.0.1", "port": settings["port"]},
        "nemo_gym_log_dir": str(folder / "logs"),
    }


def tasks(settings):
    """Return tasks of the environments' own example files, each `repeats` times."""
    found = []
    for name in settings["environments"]:
        lines = (PARENT_DIR / f"resources_servers/{name}/data/example.jsonl").read_text().splitlines()
        for row in map(json.loads, lines[settings["first"] :][: settings["tasks"]]):
            parameters = {**row["responses_create_params"], **settings["parameters"]}
            agent = {"type": "responses_api_agents", "name": f"{name}_simple_agent"}
            found += [{**row, "responses_create_params": parameters, "agent_ref": agent}] * settings["repeats"]
    return [{**row, "_ng_task_index": number, "_ng_rollout_index": 0} for number, row in enumerate(found)]


def wait_for(path):
    """Wait until the test creates this file."""
    while not path.exists():
        time.sleep(0.1)


async def collect(settings):
    """Run the first rollouts, then the last `late` ones when the file `gate` exists."""
    server = BaseServerConfig(host="127.0.0.1", port=settings["port"])
    results, rows = {}, tasks(settings)
    early = len(rows) - settings["late"]
    late = rows[early:]
    for part in (rows[:early], late):
        if part is late and part:
            await asyncio.to_thread(wait_for, Path(settings["gate"]))
        for future in RolloutCollectionHelper().run_examples(part, head_server_config=server):
            row, result = await future
            results[row["_ng_task_index"]] = {"task": row, "result": result}
            print(f"rollouts {len(results)}", flush=True)
    return [results[number] for number in sorted(results)]


def main(url, model, folder, settings):
    """Start Ray and the servers, collect, and stop both."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20)
    helper = RunHelper()
    parsed = GlobalConfigDictParserConfig(
        initial_global_config_dict=DictConfig(config_of(url, model, Path(folder), settings)), skip_load_from_cli=True
    )
    helper.start(parsed)
    try:
        begin = time.monotonic()
        rollouts = asyncio.run(collect(settings))
        print(f"collected in {time.monotonic() - begin:.1f} s", flush=True)
    finally:
        # NeMo Gym stops only the shells in which it started its servers.
        started = psutil.Process().children(recursive=True)
        helper.shutdown()
        ray.shutdown()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    print("seen " + json.dumps({"rollouts": rollouts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
