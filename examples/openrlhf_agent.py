"""An agent function for OpenRLHF 0.11: rollouts come from a fleet, by the HTTP service, and not from OpenRLHF's engine.

    ROLLBUS_HTTP=http://service:8000 python -m openrlhf.cli.train_ppo_ray --train.agent_func_path openrlhf_agent.py ...

Derive from `MultiTurnAgentExecutor` instead for an environment of several turns. Each turn sends token ids, so nothing
is tokenized again. `weight_versions` in the response has the version of each sampled token.
"""

import os
from types import SimpleNamespace

import aiohttp
from openrlhf.utils.agent import SingleTurnAgentExecutor

SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_token_ids",
    "skip_special_tokens",
    "seed",
)
TIMEOUT_S = 3600.0


class FleetEngine:
    """Has the `generate` of OpenRLHF's Ray actor. A killed worker or new weights need no retry here."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") + "/v1/completions"
        self.weight_versions: list[int] = []

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        """Continue token ids. Raise an error if the service answers none, for example for images."""
        if multi_modal_data:
            raise ValueError("multi_modal_data is given; allowed: None, because rollbus serves text models only")
        body = {name: getattr(sampling_params, name) for name in SAMPLING}
        body |= {"prompt": list(prompt_token_ids), "logprobs": 0, "return_token_ids": True}
        body["nvext"] = {"extra_fields": ["engine_data"]}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(self.url, json=body) as response:
            answer = await response.json()
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])
        (choice,), data = answer["choices"], answer["nvext"]["engine_data"]
        self.weight_versions += data["completion_weight_versions"]
        ids = choice["token_ids"]
        scores = [
            {token: SimpleNamespace(logprob=value)}
            for token, value in zip(ids, choice["logprobs"]["token_logprobs"], strict=True)
        ]
        output = SimpleNamespace(
            token_ids=ids, text=choice["text"], finish_reason=choice["finish_reason"], logprobs=scores
        )
        return SimpleNamespace(outputs=[output])


class AgentExecutor(SingleTurnAgentExecutor):
    """OpenRLHF's own executor with another engine."""

    def __init__(self) -> None:
        super().__init__(os.environ.get("REWARD_URL"))

    async def execute(self, *args, llm_engine=None, **kwargs):
        """Sample one answer, as OpenRLHF does."""
        return await super().execute(*args, llm_engine=FleetEngine(os.environ["ROLLBUS_HTTP"]), **kwargs)
