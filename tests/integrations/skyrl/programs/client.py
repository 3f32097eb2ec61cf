"""Program for SkyRL's Python: its client with versions against a service, and the members of its interface.

python client.py URL MODEL ADAPTER
"""

import asyncio
import json
import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

from rollbus.integrations.skyrl import with_versions

url, model, adapter = sys.argv[1:]


class Tokenizer:
    """Decodes nothing, because the test's model has no text."""

    def batch_decode(self, ids):
        """Return empty texts."""
        return [""] * len(ids)


async def main():
    """Call each member of the interface that the service answers."""
    plain = RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=model,
        enable_return_routed_experts=True, tokenizer=Tokenizer(),
    )  # fmt: skip
    client = with_versions(plain)
    asked = {
        "prompt_token_ids": [[5, 6, 7, 8], [9, 10, 11]],
        "sampling_params": {"max_tokens": 6, "min_tokens": 1, "top_k": -1, "logprobs": 0, "stop": None},
        "session_ids": ["a_0", "a_1"],
        "routed_experts_prompt_starts": [0, 1],
        "cache_salt": "v0",
    }
    output = await client.generate(asked)
    await client.pause_generation()
    await client.resume_generation()
    await client.reset_prefix_cache()
    await client.load_lora_adapter("polite", adapter)
    adapted = await client.generate({**asked, "routed_experts_prompt_starts": None}, model="polite")
    await client.unload_lora_adapter("polite")
    await client.finish_session("a_0")
    rows = output["rollout_expert_indices"]
    seen = {
        "members": sorted(InferenceEngineInterface.__abstractmethods__),
        "missing": sorted(client.__abstractmethods__),
        "shapes": [list(each.shape) for each in rows],
        "dtypes": [each.dtype.name for each in rows],
        "ids": output["response_ids"],
        "adapted": adapted["response_ids"],
        "logprobs": output["response_logprobs"],
        "versions": [[turn.tolist() for turn in client.pop_versions(name)] for name in asked["session_ids"]],
        "world": await client.get_world_size(),
        "is_sleeping": await client.is_sleeping(),
    }
    await client.teardown()
    print("\nseen", json.dumps(seen))


asyncio.run(main())
