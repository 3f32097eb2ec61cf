"""Program for the trainers' Python: the integration with TRL's own types, without a fleet; prints `ok`.

python trl_units.py MODEL_FOLDER
"""

import sys
from types import SimpleNamespace

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rollbus import Generation, InvalidRequest, SamplingParams
from rollbus.bus.protocol.fleet.command_result import CommandResult
from rollbus.integrations.publisher import behind, merged_state
from rollbus.integrations.trl import Rollouts, RolloutWorker
from rollbus.integrations.trl.async_grpo import _advantages
from rollbus.integrations.trl.grpo import sampling_of, seeded, token_ids_of
from rollbus.schemas.chunk import FinishReason
from rollbus.trainer.checkpoint import checkpoint_tensors

TOKENIZER = AutoTokenizer.from_pretrained(sys.argv[1])
EOS = TOKENIZER.eos_token_id
CONVERSATIONS = [
    [{"role": "user", "content": "one"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a longer question of several words"}],
    [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2 + 2?"},
    ],
]


def refused(field, function, *args, **kwargs):
    """Assert that this call rejects this field."""
    try:
        function(*args, **kwargs)
    except InvalidRequest as error:
        assert error.field == field, error
    else:
        raise AssertionError(f"{field} was not refused")


def trainer_with(prompts, **settings):
    """Return the attributes of a trainer that prompts and sampling need, with TRL's own configuration."""
    args = GRPOConfig(output_dir="none", use_cpu=True, bf16=False, report_to=[], **settings)
    return SimpleNamespace(
        args=args, processing_class=TOKENIZER, chat_template=None, chat_template_kwargs={}, tools=None,
        eos_token_ids=[EOS], environment_factories=None, _is_vlm=False,
        accelerator=SimpleNamespace(process_index=1, num_processes=2),
    )  # fmt: skip


def prompts_are_those_of_trl():
    parts = [[{"role": "user", "content": [{"type": "text", "text": "one"}]}]]
    for prompts in (CONVERSATIONS, parts, ["one", "a longer prompt"]):
        own, *_ = GRPOTrainer._tokenize_prompts(trainer_with(prompts), prompts)
        assert token_ids_of(prompts, TOKENIZER) == [list(ids) for ids in own]
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]
    refused("prompt", token_ids_of, [image], TOKENIZER)


def sampling_is_that_of_the_config():
    config = GRPOConfig(
        output_dir="none", use_cpu=True, bf16=False, max_completion_length=7, temperature=0.7, top_k=5, min_p=0.1,
        generation_kwargs={"min_tokens": 2},
    )  # fmt: skip
    sampling = sampling_of(config, [EOS])
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.min_p) == (7, 0.7, 5, 0.1)
    assert (sampling.min_tokens, list(sampling.stop_token_ids), sampling.seed) == (2, [EOS], None)
    assert seeded(sampling, 3) is sampling
    assert [seeded(SamplingParams(seed=5), each).seed for each in range(3)] == [5, 6, 7]
    for name in ("n", "logprobs", "cache_implementation"):
        config.generation_kwargs = {name: 1}
        refused("generation_kwargs", sampling_of, config, [EOS])


def advantages_are_those_of_trl():
    for group in ([0.0, 1.0, 1.0, 0.25], [0.1] * 3, [np.nan, 2.0, -1.0], [np.nan] * 2, [3.0]):
        rewards = np.array(group)
        scored = rewards[~np.isnan(rewards)]
        expected = np.zeros_like(rewards)  # as in trl.experimental.async_grpo.async_rollout_worker
        if len(scored):
            expected[~np.isnan(rewards)] = (scored - scored.mean()) / (scored.std() + 1e-8)
        np.testing.assert_allclose(_advantages(rewards), expected, rtol=1e-6, atol=1e-6)


def only_workers_that_were_asked_are_behind():
    def worker(name, incarnation="first"):
        return SimpleNamespace(worker=name, incarnation=incarnation)

    ledger = CommandResult(
        command="update_weights", id="c", failed={"broken": None}, missing=dict.fromkeys(("mute", "dead", "again"), "")
    )
    before = [worker(name) for name in ("broken", "mute", "dead", "again", "good")]
    now = [worker("broken"), worker("mute"), worker("again", "second"), worker("good"), worker("new")]
    assert behind(ledger, before, now) == {"broken", "mute"}


class StoppedFleet:
    """Aborts the first request of the first two calls after one token, and completes all other requests."""

    def __init__(self):
        self.asked = []

    def complete_many(self, requests, max_in_flight):
        self.asked.append(requests)
        for index, request in reversed(list(enumerate(requests))):
            is_cut = index == 0 and len(self.asked) <= 2
            tokens = np.array([7] if is_cut else [8, EOS], np.int32)
            yield Generation(
                request=request, request_id=request.request_id, child=0, prompt_len=len(request.prompt_token_ids),
                token_ids=tokens, logprobs=np.full(len(tokens), -0.5, np.float32), routed_experts=None, start=0,
                weight_versions=np.full(len(tokens), len(self.asked), np.int32),
                finish_reason=FinishReason.ABORT if is_cut else FinishReason.STOP,
            )  # fmt: skip


class RolloutsOfStoppedFleet(Rollouts):
    """Rollouts whose client is a `StoppedFleet`."""

    def _connected(self):
        return fleet


def aborted_answers_resume():
    prompts = [CONVERSATIONS[0]] * 2 + [CONVERSATIONS[1]]
    answer = RolloutsOfStoppedFleet()(prompts, trainer_with(prompts, generation_kwargs={"seed": 3}))
    assert answer["completion_ids"] == [[7, 7, 8, EOS], [8, EOS], [8, EOS]]
    assert answer["weight_versions"] == [[1, 2, 3, 3], [1, 1], [1, 1]]
    assert list(map(len, answer["logprobs"])) == [4, 2, 2]
    assert answer["prompt_ids"] == token_ids_of(prompts, TOKENIZER)
    first = fleet.asked[0]
    assert first[0].group_id == first[1].group_id != first[2].group_id
    assert [request.sampling.seed for request in first] == [4, 6, 8], "of the second of two ranks"


def adapters_are_added_to_the_weights():
    folder, ids = sys.argv[1], torch.arange(5, 45)[None]
    config = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    frozen = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        LoraConfig(modules_to_save=["lm_head"], **config),
    )
    with torch.no_grad():
        adapted.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
        expected = adapted(ids).logits
        plain.load_state_dict(dict(checkpoint_tensors(adapted.get_base_model(), folder, state=merged_state(adapted))))
        torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-4, atol=1e-4)
        with adapted.disable_adapter():
            plain.load_state_dict(frozen)
            assert torch.equal(plain(ids).logits, adapted(ids).logits), "the trainer's frozen weights stay"
    for other in (LoraConfig(use_dora=True, **config), LoraConfig(lora_bias=True, **config)):
        refused("model", merged_state, get_peft_model(AutoModelForCausalLM.from_pretrained(folder), other))


def a_reward_for_each_completion():
    worker = RolloutWorker(
        dataset=[{"prompt": "one"}], reward_funcs=[lambda completions, **_: [0.0]], tokenizer=TOKENIZER,
        sampling=SamplingParams(), num_generations=2,
    )  # fmt: skip
    refused(
        "sampling.logprobs", RolloutWorker, dataset=[{"prompt": "one"}], reward_funcs=[len], tokenizer=TOKENIZER,
        sampling=SamplingParams(logprobs=None),
    )  # fmt: skip
    answers = [SimpleNamespace(token_ids=np.array([5, EOS]))] * 2
    refused("rewards", worker._rewards, {"prompt": "one"}, ["a", "b"], answers)


torch.set_num_threads(1)
fleet = StoppedFleet()
prompts_are_those_of_trl()
sampling_is_that_of_the_config()
advantages_are_those_of_trl()
only_workers_that_were_asked_are_behind()
aborted_answers_resume()
adapters_are_added_to_the_weights()
a_reward_for_each_completion()
print("ok")
