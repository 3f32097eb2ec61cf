"""A session on a real engine, with text that the model chooses itself: a second forward pass computes its sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbus.frontend.http import Settings
from tests.http.support import http_before, rows_of
from tests.sessions.support import Owner, agent_of
from tests.support.second_pass import check_second_pass

pytestmark = [pytest.mark.vllm, pytest.mark.routing]


async def test_a_second_forward_pass_over_five_turns_gives_the_same_sample(
    nats_url: str, real_fleet: str, tiny_moe_float32: Path
) -> None:
    """Five turns of an unchanged client, at temperature 1, are one branch with a row for each token but the last.

    Hugging Face computes the same log probabilities of all sampled tokens, and routes all tokens to the same experts.
    """
    async with http_before(nats_url, real_fleet, Settings()) as http:
        await http.own.fleet.wait_for_workers()
        (worker,) = http.own.fleet.workers
        owner = Owner(http.client)
        session = await owner.open(routed_experts=True)
        async with agent_of(session) as agent:
            messages: list[Any] = [{"role": "system", "content": "Be brief."}]
            for turn in range(5):
                messages.append({"role": "user", "content": f"Question {turn}?"})
                answer = await agent.chat.completions.create(model=worker.model, messages=messages, max_tokens=12)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        (sample,) = await owner.samples(session)
    assert sample["forks"] == [None] * 5
    assert np.unique(np.array(sample["turn_of_token"])[sample["loss_mask"]]).tolist() == list(range(5))
    check_second_pass(tiny_moe_float32, sample, rows_of(sample["routed_experts"]))
