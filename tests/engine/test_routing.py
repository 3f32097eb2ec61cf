"""Tokens, log probabilities and routed experts are those of the model, regardless of the other work of the engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import expected_rows
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.tiny_moe import SENTENCES, VOCAB_SIZE, main, make_tiny_moe
from tests.engine import direct_llm
from tests.engine.support import prompt, rows_here, same_as_alone
from tests.support.requests import expert_sets
from tests.support.vllm_engine import Engines, Result, RunningEngine

pytestmark = pytest.mark.vllm


ORACLE_PROMPT = [int(i) for i in prompt(200, seed=1)]
ORACLE_SAMPLING: dict[str, Any] = {"max_tokens": 100, "temperature": 1.0, "seed": 11, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def oracle(engines: Engines) -> Result:
    """Return the result of 200 prompt tokens and 100 sampled tokens."""
    request = GenerateRequest(prompt_token_ids=ORACLE_PROMPT, sampling=SamplingParams(**ORACLE_SAMPLING))
    return engines.get("moe").generate(request)[0]


@pytest.fixture(scope="module")
def hugging_face(oracle: Result, models: dict[str, Path]) -> Any:
    """Return the results of Hugging Face's model for the same tokens, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["moe"], dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ORACLE_PROMPT + oracle.token_ids]), output_router_logits=True)


@pytest.mark.proves("P15")
def test_logprobs_equal_hugging_face(oracle: Result, hugging_face: Any) -> None:
    """In float32, log probabilities equal those of Hugging Face's model to 1e-4."""
    logprobs = hugging_face.logits[0].log_softmax(-1)[199:-1].numpy()

    assert np.abs(logprobs[np.arange(100), oracle.token_ids] - oracle.logprobs).max() < 1e-4


@pytest.mark.proves("P15")
@pytest.mark.routing
def test_routing_equals_hugging_face(oracle: Result, hugging_face: Any) -> None:
    """In float32, every row has the experts that Hugging Face's model chooses."""
    experts = np.stack([logits.topk(4).indices.numpy() for logits in hugging_face.router_logits], axis=1)[:-1]

    assert oracle.rows.shape == (299, 4, 4)
    assert oracle.rows.dtype == np.uint8
    assert np.array_equal(np.sort(oracle.rows, axis=-1), np.sort(experts, axis=-1))


@pytest.mark.proves("P15")
@pytest.mark.routing
async def test_tokens_equal_a_direct_asyncllm(
    oracle: Result, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same seed gives the same tokens, log probabilities and routing as vLLM's AsyncLLM without the adapter."""
    direct = await direct_llm.generate(models["moe"], ORACLE_PROMPT, ORACLE_SAMPLING, monkeypatch)

    assert oracle.token_ids == direct["token_ids"]
    assert np.abs(oracle.logprobs - direct["logprobs"]).max() < 1e-5
    assert oracle.rows.tolist() == direct["routed_experts"]


def test_64_concurrent_requests_equal_each_alone(moe: RunningEngine) -> None:
    """With chunked prefill and too little KV cache for all, each request gets the same results as alone."""
    rng = np.random.default_rng(5)
    requests = [
        GenerateRequest(
            prompt_token_ids=prompt(int(length), seed=number),
            sampling=SamplingParams(max_tokens=int(tokens), temperature=0.0, ignore_eos=True),
            routed_experts_prompt_start=int(length) // 3 if number % 4 == 0 else 0,
            cache_salt="together",
        )
        for number, (length, tokens) in enumerate(zip(rng.integers(1, 400, 64), rng.integers(1, 40, 64), strict=True))
    ]

    together = moe.generate(*requests)

    for request, result in zip(requests, together, strict=True):
        start = request.routed_experts_prompt_start
        assert result.last.finish_reason is FinishReason.LENGTH
        assert len(result.rows) == rows_here(expected_rows(request.prompt_len, start, len(result.token_ids)))
        assert result.steps[0].routed_experts_start == start
    same_as_alone(moe, requests, together)


def test_preempted_requests_lose_and_repeat_no_rows(moe: RunningEngine, preemptions: list[str]) -> None:
    """A request whose KV cache was removed and computed again has each row once, with the right experts."""
    requests = [
        GenerateRequest(
            prompt_token_ids=prompt(90, seed=100 + number),
            sampling=SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1),
            cache_salt="crowded",
        )
        for number in range(12)
    ]

    together = moe.generate(*requests)

    assert len(set(preemptions)) >= 3
    for result in together:
        assert len(result.token_ids) == 200
        assert len(result.rows) == rows_here(289)
        prompt_logprobs = result.steps[0].prompt_logprobs
        assert len(prompt_logprobs.logprobs) == 89
    same_as_alone(moe, requests[-4:], together[-4:])


def test_cached_prefix_has_its_rows(moe: RunningEngine) -> None:
    """Rows of prompt tokens in the prefix cache are returned, and equal the rows computed before."""
    request = GenerateRequest(
        prompt_token_ids=prompt(150, seed=7),
        sampling=SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
        cache_salt="prefix",
    )
    first, second = moe.generate(request)[0], moe.generate(request)[0]

    assert first.steps[0].cached_tokens == 0
    assert second.steps[0].cached_tokens == 128
    assert second.steps[1].cached_tokens is None
    assert np.array_equal(expert_sets(first.rows), expert_sets(second.rows))


def test_cache_salt_keeps_prefixes_apart(moe: RunningEngine) -> None:
    """The prefix cache finds a prompt only under the salt with which it was computed."""
    sampling = SamplingParams(max_tokens=1)
    ids = prompt(150, seed=8)
    for salt in ("one", "two", None):
        result = moe.generate(GenerateRequest(prompt_token_ids=ids, sampling=sampling, cache_salt=salt))[0]
        assert result.steps[0].cached_tokens == 0


@pytest.mark.routing
@pytest.mark.parametrize(("start", "max_tokens", "num_rows"), [(0, 1, 30), (20, 1, 10), (30, 1, 0), (30, 4, 3)])
def test_start_drops_leading_rows(moe: RunningEngine, start: int, max_tokens: int, num_rows: int) -> None:
    """Rows begin at `routed_experts_prompt_start`, which may leave no rows. The remaining rows do not change."""
    ids = prompt(30, seed=9)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    whole = moe.generate(GenerateRequest(prompt_token_ids=ids, sampling=sampling))[0]
    part = moe.generate(GenerateRequest(prompt_token_ids=ids, sampling=sampling, routed_experts_prompt_start=start))[0]

    assert part.rows.shape == (num_rows, 4, 4)
    assert part.steps[0].routed_experts_start == start
    assert np.array_equal(part.rows, whole.rows[start:])


def test_routing_can_be_declined(moe: RunningEngine) -> None:
    """A request that declines routing gets none, and the same tokens."""
    ids = prompt(30, seed=10)
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    with_rows, without = moe.generate(
        GenerateRequest(prompt_token_ids=ids, sampling=sampling),
        GenerateRequest(prompt_token_ids=ids, sampling=sampling, return_routed_experts=False),
    )

    assert all(step.routed_experts is None for step in without.steps)
    assert without.token_ids == with_rows.token_ids


def test_model_without_experts_has_no_routing(dense: RunningEngine) -> None:
    """A dense model announces no routing, and returns none."""
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    result = dense.generate(GenerateRequest(prompt_token_ids=prompt(30, seed=2), sampling=sampling))[0]

    assert dense.engine.capabilities.routed_experts is None
    assert len(result.token_ids) == 4
    assert all(step.routed_experts is None for step in result.steps)


# An aborted request ends once, in order, with all steps that the engine reported before.


LONG = GenerateRequest(prompt_token_ids=prompt(50, seed=60), sampling=SamplingParams(max_tokens=400, ignore_eos=True))


def test_abort_ends_a_running_request(moe: RunningEngine) -> None:
    """After an abort, the engine reports one step with finish reason ABORT and nothing more.

    The rows are those of the reported tokens.
    """

    async def scenario() -> tuple[Result, list[RequestStep]]:
        key, other = await moe.add(LONG), await moe.add(LONG)
        result = Result()
        while len(result.steps) < 5:
            result.steps.extend(step for step in await moe.next() if step.key == key)
        await moe.engine.abort([key])
        await moe.engine.abort([key, "unknown"])
        rest: list[RequestStep] = []
        is_other_open = True
        while is_other_open:
            for step in await moe.next():
                if step.key == key:
                    rest.append(step)
                elif step.key == other and step.finish_reason is not None:
                    is_other_open = False
        result.steps.extend(rest)
        return result, rest

    result, rest = moe.call(scenario())

    assert [step.finish_reason for step in rest].count(FinishReason.ABORT) == 1
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert len(result.rows) == rows_here(50 + len(result.token_ids) - 1)


def test_abort_before_the_first_token(moe: RunningEngine) -> None:
    """A request that is aborted immediately ends with no tokens and no rows, and its key is free again."""

    async def scenario() -> list[Result]:
        results = []
        for _ in range(3):
            await moe.engine.add("same-key", LONG)
            await moe.engine.abort(["same-key"])
            results.append((await moe.finish("same-key"))["same-key"])
        return results

    for result in moe.call(scenario()):
        assert len(result.steps) == 1
        assert result.last.finish_reason is FinishReason.ABORT
        assert result.token_ids == []
        assert len(result.rows) == 0
        assert result.last.routed_experts_start == 0


def test_abort_of_a_finished_request_is_ignored(moe: RunningEngine) -> None:
    """A request that ends before its abort arrives keeps its own finish reason."""
    short = GenerateRequest(prompt_token_ids=[5], sampling=SamplingParams(max_tokens=1))

    async def scenario() -> tuple[Result, Result]:
        key = await moe.add(short)
        first = (await moe.finish(key))[key]
        await moe.engine.abort([key])
        again = await moe.add(short)
        return first, (await moe.finish(again))[again]

    first, after = moe.call(scenario())

    assert first.last.finish_reason is not FinishReason.ABORT
    assert len(after.steps) == 1


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of `folder`."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_same_arguments_make_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    """The arguments determine the bytes of a model."""
    first = contents(make_tiny_moe(tmp_path / "first", seed=3))
    second = contents(make_tiny_moe(tmp_path / "second", seed=3))
    other = contents(make_tiny_moe(tmp_path / "other", seed=4))

    assert first == second
    assert first["model.safetensors"] != other["model.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", "other"}


def test_an_existing_model_is_kept_and_other_content_is_not_overwritten(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    """Making a model again changes nothing. A folder with other content is rejected and does not change."""
    marker = models["moe"] / "tiny_moe.json"
    before = marker.stat().st_mtime_ns
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")

    assert make_tiny_moe(models["moe"], dtype="float32") == models["moe"]
    assert marker.stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="not the requested model"):
        make_tiny_moe(tmp_path / "mine")
    assert main(["--output", str(tmp_path / "mine")]) == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes"]


def test_the_tokenizer_restores_any_text(models: dict[str, Path]) -> None:
    """The tokenizer encodes every byte, special tokens are single ids, and a chat template exists."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["moe"])
    text = bytes(range(256)).decode("latin-1") + "日本 😀\n\t" + SENTENCES[0]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )

    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_every_expert_is_used_and_the_best_token_is_clear(models: dict[str, Path]) -> None:
    """Every expert is used and the best token is clear, so rounding decides neither routing nor greedy tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["moe"])
    model = AutoModelForCausalLM.from_pretrained(models["moe"], dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("\n".join(SENTENCES))])
    with torch.no_grad():
        output = model(ids, output_router_logits=True)
    experts = [logits.topk(4).indices for logits in output.router_logits]
    best = output.logits[0].topk(2).values
    gaps = (best[:, 0] - best[:, 1]).numpy()

    assert len(experts) == 4
    for layer in experts:
        shares = np.bincount(layer.flatten().numpy(), minlength=16) / layer.numel()
        assert shares.min() > 0.004
    assert np.median(gaps) > 0.1
    assert len(set(output.logits[0].argmax(-1).tolist())) > 100


def test_dense_model_has_no_experts(models: dict[str, Path]) -> None:
    """The dense variant is a Qwen3 with the same tokenizer."""
    config = json.loads((models["dense"] / "config.json").read_text())

    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (models["dense"] / "tokenizer.json").read_bytes() == (models["moe"] / "tokenizer.json").read_bytes()
