"""`rollbus.integrations.nemo` against NeMo-RL's `GenerationInterface`, whose signatures are data here.

Not run with the package: nemo-rl on PyPI is a placeholder of version 0.0.0.
"""

import asyncio
import contextlib
import copy
import inspect
import uuid
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollbus
from rollbus.bus.client.generation import Generation
from rollbus.integrations.nemo import RollbusGeneration, RollbusWeights
from rollbus.integrations.nemo.batches import Unfinished, length_before_stop, prompts_of, row_dtype
from rollbus.schemas.errors import InvalidRequest
from tests.support.fleet import synthetic_worker

SOURCE = "https://github.com/NVIDIA-NeMo/RL/blob/7ea279abfbeb698b092856d0dab61e7cf39bc909/"
GENERATION = {
    # nemo_rl/models/generation/interfaces.py
    "init_collective": ["ip", "port", "world_size", "*train_world_size"],
    "generate": ["data", "greedy"],
    "prepare_for_generation": ["args", "kwargs"],
    "finish_generation": ["args", "kwargs"],
    "shutdown": [],
    "requires_kv_scale_sync": None,
    "prepare_refit_info": ["state_dict_info"],
    "update_weights_via_ipc_zmq": [],
    "update_weights_from_collective": [],
    "get_collective_sender_spec": [],
    "get_inference_world_size": [],
    "prepare_nccl_reshard_refit_info": ["refit_info"],
    "nccl_reshard_refit": [],
    "attach_fleet_health": ["monitor", "selector"],
    "invalidate_kv_cache": [],
    "blocks_training": [],
    "wake_carries_weight_updates": [],
    "clear_logger_metrics": [],
    "get_logger_metrics": [],
    # Called by nemo_rl/experience/rollouts.py.
    "generate_async": ["data", "greedy"],
}
"""Members of the interface and their parameters; `*` marks one that is given by name, None a property."""
SYNCHRONIZER = {
    # nemo_rl/weight_sync/interfaces.py
    "sync_weights": ["*timer", "*kv_scales"],
    "is_stale": None,
    "init_communicator": [],
    "shutdown": [],
}
CONFIG = {
    "max_new_tokens": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "stop_token_ids": None,
    "stop_strings": None,
    "_pad_token_id": 0,
}


SAMPLING = rollbus.SamplingParams(max_tokens=32)


class Batch(UserDict[str, Any]):
    """A batch as NeMo-RL's `BatchedDataDict`: a UserDict that is made of a dict."""


class Monitor:
    """The part of NeMo-RL's `GenerationFleetHealth` that the adapter calls of fleet_health.py."""

    def __init__(self, shard_count: int = 1) -> None:
        self.shard_count = shard_count
        self.seen: list[tuple[Any, ...]] = []

    def report_success(self, shard_idx: int) -> None:
        self.seen.append(("success", shard_idx))

    def report_failure(self, shard_idx: int, error: BaseException) -> None:
        self.seen.append(("failure", shard_idx, type(error).__name__))

    def report_refit(self, shard_idx: int, *, weight_version: int) -> None:
        self.seen.append(("refit", shard_idx, weight_version))


def batch(*prompts: list[int], **fields: Any) -> Batch:
    """Return a batch of prompts, padded on the right."""
    length = max(map(len, prompts))
    rows = [prompt + [0] * (length - len(prompt)) for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return Batch({"input_ids": torch.tensor(rows), "input_lengths": lengths, **fields})


def answered(request: rollbus.GenerateRequest, finish: str) -> Generation:
    """Return an answer of one token."""
    return Generation(
        request=request,
        request_id=request.request_id,
        child=0,
        prompt_len=request.prompt_len,
        token_ids=np.array([7], np.int32),
        logprobs=np.zeros(1, np.float32),
        weight_versions=np.zeros(1, np.int32),
        routed_experts=None,
        start=request.routed_experts_prompt_start,
        finish_reason=rollbus.FinishReason(finish),
    )


def parameters(member: Any) -> list[str] | None:
    """Return the names of a method's parameters, None for a property."""
    if isinstance(member, property):
        return None
    found = list(inspect.signature(member).parameters.values())[1:]
    return [f"*{each.name}" if each.kind is each.KEYWORD_ONLY else each.name for each in found]


@pytest.mark.parametrize(
    ("interface", "own"),
    [(GENERATION, RollbusGeneration), (SYNCHRONIZER, RollbusWeights)],
    ids=["GenerationInterface", "WeightSynchronizer"],
)
def test_the_class_has_each_member_of_the_interface(interface: dict[str, Any], own: type) -> None:
    """Each member exists with the interface's parameters. A difference is reported with its name."""
    different = {
        name: parameters(vars(own)[name]) if name in vars(own) else "missing"
        for name, wanted in interface.items()
        if name not in vars(own) or parameters(vars(own)[name]) != wanted
    }
    assert different == {}, SOURCE
    assert RollbusGeneration.shutdown(RollbusGeneration(CONFIG)), "without a connection"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_lengths": torch.tensor([2])}, "input_ids has the shape"),
        ({"input_lengths": torch.tensor([0, 3])}, r"input_lengths\[0\] is 0; allowed: 1 to 3"),
        ({"input_lengths": torch.tensor([2, 4])}, r"input_lengths\[1\] is 4; allowed: 1 to 3"),
        ({"input_lengths": torch.tensor([1, 3])}, r"input_ids\[0\] has a token after its 1 tokens"),
        ({"stop_strings": ["a"]}, "stop_strings has 1 items; allowed: 2"),
        ({"stop_strings": [[""], None]}, r"stop_strings\[0\] is \[''\]"),
        ({"stop_strings": [[7], None]}, r"stop_strings\[0\] is \[7\]"),
        ({"vllm_content": ["image"]}, "vllm_content is set"),
    ],
)
def test_a_batch_that_is_not_one_is_rejected(fields: dict[str, Any], message: str) -> None:
    """The error gives the field, the sample and what is allowed."""
    data = batch([5, 6], [7, 8, 9], **fields)
    if fields.get("input_ids", 0) is None:
        del data["input_ids"]
    with pytest.raises(InvalidRequest, match=message):
        prompts_of(data, CONFIG)


def test_stop_strings_of_batch_and_config_hold_together() -> None:
    """A sample has the stop strings of the config and its own, once each; NeMo-RL passes None for none."""
    data = batch([5], [6], stop_strings=[None, ["b", "a"]])
    assert [prompt.stop_strings for prompt in prompts_of(data, {**CONFIG, "stop_strings": ["a"]})] == [
        ("a",),
        ("a", "b"),
    ]
    assert [prompt.stop_strings for prompt in prompts_of(batch([5]), CONFIG)] == [()]


@pytest.mark.parametrize(
    ("stops", "count"), [((), 6), (("x",), 6), (("cd",), 4), (("ef", "b"), 2), (("a",), 1), (("f",), 6)]
)
def test_a_generation_ends_with_the_token_that_completes_a_stop_string(stops: tuple[str, ...], count: int) -> None:
    """The first stop string counts, also if it spans tokens."""
    assert length_before_stop([0, 1, 2, 3, 4, 5], stops, lambda ids: "".join("abcdef"[i] for i in ids)) == count


def test_interrupted_answers_are_continued_until_they_are_whole() -> None:
    """The parts are joined under the number of the request. An answer that never ends is an error."""
    requests = [rollbus.GenerateRequest(prompt_token_ids=[token], sampling=SAMPLING) for token in (5, 6)]
    unfinished = Unfinished(requests)
    found: dict[int, Generation] = {}
    for number, sent in enumerate(unfinished.rounds()):
        for request in sent:
            stopped = number < 2 and 6 in request.prompt_token_ids
            found |= dict(filter(None, [unfinished.take(answered(request, "abort" if stopped else "length"))]))
    assert {number: answer.token_ids.tolist() for number, answer in found.items()} == {0: [7], 1: [7, 7, 7]}
    assert [found[number].request for number in (0, 1)] == requests
    unfinished = Unfinished(requests[:1])
    rounds = unfinished.rounds()
    for _ in range(17):
        assert unfinished.take(answered(next(rounds)[0], "abort")) is None
    with pytest.raises(InvalidRequest, match="was interrupted more than 16 times"):
        next(rounds)


def test_rows_have_the_smallest_signed_dtype_of_nemo_rl() -> None:
    """128 experts fit int8, 32,768 int16 (`resolve_routed_experts_dtype` of interfaces.py)."""
    assert [row_dtype(count) for count in (8, 128, 129, 256, 32_768, 32_769)] == [
        *("int8", "int8", "int16", "int16", "int16", "int32")
    ]


def test_what_the_fleet_cannot_do_is_an_error() -> None:
    """Collectives and shared GPUs are not supported, and a config without a needed value is rejected."""
    generation = RollbusGeneration(CONFIG)
    for call in (generation.update_weights_via_ipc_zmq, generation.update_weights_from_collective):
        with pytest.raises(NotImplementedError, match="set weight_synchronizer"):
            call()
    with pytest.raises(NotImplementedError, match="set weight_synchronizer"):
        generation.init_collective("127.0.0.1", 1, 2, train_world_size=1)
    with pytest.raises(InvalidRequest, match="monitor has 2 shards; allowed: 1"):
        generation.attach_fleet_health(Monitor(2), None)
    with pytest.raises(InvalidRequest, match="checkpoint is not set"):
        generation.prepare_refit_info({})
    with pytest.raises(InvalidRequest, match=r"config\.top_p is missing"):
        RollbusGeneration({name: value for name, value in CONFIG.items() if name != "top_p"})
    with pytest.raises(InvalidRequest, match="kv_scales are set"):
        RollbusWeights(generation, list).sync_weights(kv_scales={"layer": 1.0})


async def test_batches_of_a_fleet_are_those_of_a_bus_client(nats_url: str) -> None:
    """A greedy batch has the tokens, log probabilities, versions and rows of a bus client, at NeMo-RL's positions."""
    fleet = f"nemo-{uuid.uuid4().hex[:8]}"
    prompts = [[5, 6, 7, 8], [9, 10]]
    async with synthetic_worker(nats_url, fleet), rollbus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        generation, monitor = RollbusGeneration(CONFIG, nats_url, fleet=fleet), Monitor()
        copied = copy.copy(generation)
        async with contextlib.AsyncExitStack() as stack:
            for each in (generation, copied):
                stack.push_async_callback(asyncio.to_thread, each.shutdown)
            generation.attach_fleet_health(monitor, None)
            assert await asyncio.to_thread(generation.prepare_for_generation)
            output = await asyncio.to_thread(generation.generate, batch(*prompts), True)
            assert type(output) is Batch
            singles = {number: each async for number, each in copied.generate_async(batch(*prompts), True)}
            metrics = await asyncio.to_thread(generation.get_logger_metrics)
            with pytest.raises(InvalidRequest, match="stop_strings are set"):
                await asyncio.to_thread(generation.generate, batch([5], stop_strings=["x"]), True)
        assert metrics["rollbus/workers"] == 1
        assert monitor.seen == [("success", 0)]
        assert sorted(singles) == [0, 1]
        for number, prompt in enumerate(prompts):
            wanted = await rb.complete(prompt, max_tokens=8, temperature=0.0)
            begin, end = len(prompt), len(prompt) + len(wanted.token_ids)
            for found, at in ((output, number), (singles[number], 0)):
                assert found["unpadded_sequence_lengths"][at] == end
                assert found["generation_lengths"][at] == len(wanted.token_ids)
                assert found["output_ids"][at, :end].tolist() == [*prompt, *wanted.token_ids.tolist()]
                assert found["output_ids"].dtype == torch.int64
                assert np.array_equal(found["logprobs"][at, begin:end].numpy(), wanted.logprobs)
                assert not found["logprobs"][at, :begin].any()
                assert found["weight_versions"][at, begin:end].tolist() == wanted.weight_versions.tolist()
                assert set(found["weight_versions"][at, :begin].tolist()) == {-1}
                assert bool(found["truncated"][at]) == (wanted.finish_reason == "length")
                rows = found["routed_experts"][at].numpy()
                assert wanted.routed_experts is not None
                assert np.array_equal(rows[: end - 1], wanted.routed_experts.astype(rows.dtype))
                assert np.array_equal(rows[end - 1], np.broadcast_to(np.arange(rows.shape[-1]), rows[0].shape))


def test_a_copy_for_another_process_has_no_connection() -> None:
    """A copy keeps the arguments and leaves connection, lease and synchronizer to the original."""
    generation = RollbusGeneration(CONFIG, "nats://127.0.0.1:1", model="m", checkpoint=Path("/nowhere"))
    generation.weight_synchronizer = RollbusWeights(generation, list)
    copied = copy.copy(generation)
    assert repr(copied) == "<RollbusGeneration model=m not connected>"
    assert copied.weight_synchronizer is None
    assert copied.cfg == generation.cfg
