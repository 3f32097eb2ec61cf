"""Rollouts, evaluations and updates as slime calls them, with stand-ins for its classes, on workers of both kinds."""

import asyncio
import inspect
import itertools
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rollbus
from rollbus.integrations.slime import generate, generate_rollout, update_weights
from rollbus.integrations.slime.connection import read_settings, shared_client
from rollbus.schemas.errors import InvalidRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.integrations.slime_standin import Source, arguments, dataset, evaluate, install
from tests.support.fleet import synthetic_worker, until_state
from tests.support.real_fleet import RealWorkers
from tests.support.requests import TOLERANCE
from tests.support.waits import in_trainers_run

PROMPTS = ["one", "two and two", "a longer prompt of several words", "0 1 2 3", "five", "six of them"]
HERE = "tests.integrations.test_slime"
LONG = 1500
"""Tokens of a response during which a worker dies and the weights change."""
NEAR = 1e-3
"""Difference of two router logits below which either expert may be chosen in float32."""


@pytest.fixture
def sample_class(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """Return the class of samples of the importable `slime`."""
    return install(monkeypatch)


async def long_response(args: Namespace, sample: Any, sampling_params: Mapping[str, Any]) -> Any:
    """Generate a response of exactly `args.long` tokens: a custom function of a user."""
    length = {"max_new_tokens": args.long, "min_new_tokens": args.long}
    return await generate(args, sample, {**sampling_params, **length})


def two_of_three(args: Namespace, group: list[Any]) -> SimpleNamespace:
    """Drop the first group: a filter of a user."""
    return SimpleNamespace(keep=group[0].group_index != 0, reason="first")


async def group_reward(args: Namespace, samples: list[Any]) -> list[float]:
    """Return the number of a group's samples for each of them: a reward function of a user."""
    return [float(len(samples))] * len(samples)


def close(args: Namespace) -> None:
    """Close the client of this process, which otherwise lasts as long as the process."""
    shared_client(read_settings(args)).close()


def check_sample(sample: Any, args: Namespace) -> None:
    """Check that a finished sample has each value for each of its tokens."""
    versions, length = sample.metadata["rollbus"]["weight_versions"], sample.response_length
    assert sample.status.name in {"COMPLETED", "TRUNCATED"}
    assert length == len(sample.rollout_log_probs) == len(sample.loss_mask) == len(versions)
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, args.num_layers, args.moe_router_topk)
    # slime has an entry for each request, so a sample that was continued may have the same version twice.
    spans = [version for version, _ in itertools.groupby(sample.weight_versions)]
    assert spans == [str(version) for version, _ in itertools.groupby(versions)]
    assert all(before <= after for before, after in itertools.pairwise(versions))


def test_the_functions_have_the_signatures_that_slime_calls() -> None:
    """The caller gives `evaluation` by name, and compares a rollout function's signature with its own."""
    assert str(inspect.signature(generate_rollout)).startswith(
        "(args: Any, rollout_id: int, data_source: Any, evaluation"
    )
    assert inspect.signature(generate_rollout).parameters.keys() == inspect.signature(evaluate).parameters.keys()
    assert list(inspect.signature(generate).parameters) == ["args", "sample", "sampling_params", "evaluation"]
    assert list(inspect.signature(update_weights).parameters) == ["args", "version_dir", "rollout_engines"]


async def test_surplus_groups_come_back_with_their_tokens_and_continue(
    nats_url: str, fleet: str, sample_class: type[Any], tiny_moe_float32: Path
) -> None:
    """A rollout ends with its first groups; the others are aborted, keep their tokens and continue in the next rollout.

    No token is lost or sampled twice: greedy responses equal those of undisturbed requests.
    """
    args = arguments(
        tiny_moe_float32,
        rollbus_nats=nats_url,
        rollbus_fleet=fleet,
        over_sampling_batch_size=4,
        rollout_temperature=0.0,
        partial_rollout=True,
        # Steps in which the other groups get their first tokens.
        rollout_max_response_len=200,
        long=4_000_000,
    )
    source = Source(PROMPTS, 2, sample_class)
    groups = source.get_samples(4)
    for group in groups[2:]:
        for sample in group:
            sample.generate_function_path = f"{HERE}.long_response"
    source.buffer = groups
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(synthetic_worker(nats_url, fleet, config=SyntheticConfig(step_s=0.002)))
        stack.callback(close, args)
        rb = await stack.enter_async_context(rollbus.connect(nats_url, fleet=fleet))
        await rb.fleet.wait_for_workers()
        first = await asyncio.to_thread(generate_rollout, args, 1, source)
        aborted = [len(sample.tokens) for group in source.buffer for sample in group]
        statuses = {sample.status.name for group in source.buffer for sample in group}
        started = [sample.metadata["start_rollout_id"] for group in source.buffer for sample in group]
        args.over_sampling_batch_size = 2
        args.long = max(sample.response_length for group in source.buffer for sample in group) + 20
        second = await asyncio.to_thread(generate_rollout, args, 2, source)
        whole = [
            await rb.complete(
                sample.tokens[: -sample.response_length], max_tokens=args.long, temperature=0.0, ignore_eos=True
            )
            for group in second.samples
            for sample in group
        ]

    assert [sample.group_index for group in first.samples for sample in group] == [0, 0, 1, 1]
    assert statuses == {"ABORTED"}
    assert set(started) == {1}
    for group in (*first.samples, *second.samples):
        for sample in group:
            check_sample(sample, args)
            assert sample.reward == sample.response_length
    continued = [sample for group in second.samples for sample in group]
    assert [sample.group_index for sample in continued] == [2, 2, 3, 3]
    for sample, length, generation in zip(continued, aborted, whole, strict=True):
        assert len(sample.tokens) > length
        assert sample.response_length == args.long
        assert sample.tokens[-args.long :] == generation.token_ids.tolist()
        assert np.array_equal(sample.rollout_routed_experts.numpy(), generation.routed_experts)


async def test_filtered_groups_are_replaced_and_counted(
    nats_url: str, fleet: str, sample_class: type[Any], tiny_moe_float32: Path
) -> None:
    """A filter drops a group and another one takes its place; a group reward gets whole groups."""
    changes = {"group_rm": True, "custom_rm_path": f"{HERE}.group_reward"}
    changes["dynamic_sampling_filter_path"] = f"{HERE}.two_of_three"
    args = arguments(tiny_moe_float32, rollbus_nats=nats_url, rollbus_fleet=fleet, **changes)
    source = Source(PROMPTS, 2, sample_class)
    async with synthetic_worker(nats_url, fleet):
        output = await asyncio.to_thread(generate_rollout, args, 0, source)
        none = Source([], 2, sample_class)
        with pytest.raises(InvalidRequest, match="data_source"):
            await asyncio.to_thread(generate_rollout, args, 1, none)
        close(args)

    assert len(output.samples) == 2
    assert all(group[0].group_index != 0 for group in output.samples)
    assert output.metrics == {"rollout/dynamic_filter/drop_first": 1}
    assert [sample.reward for group in output.samples for sample in group] == [2.0] * 4


async def test_an_evaluation_samples_as_its_data_set_says(
    nats_url: str, fleet: str, sample_class: type[Any], tiny_moe_float32: Path
) -> None:
    """The package's own evaluation gets answers with the sampling parameters of the data set, and without rows."""
    args = arguments(tiny_moe_float32, rollbus_nats=nats_url, rollbus_fleet=fleet)
    args.eval_datasets = [dataset([sample_class(index=number, prompt=text) for number, text in enumerate(PROMPTS)])]
    async with synthetic_worker(nats_url, fleet), rollbus.connect(nats_url, fleet=fleet) as rb:
        output = await asyncio.to_thread(generate_rollout, args, 0, Source([], 2, sample_class), evaluation=True)
        found = output.data["test"]["samples"]
        whole = [await rb.complete(one.tokens[: -one.response_length], max_tokens=6, temperature=0.0) for one in found]
        close(args)

    assert output.data["test"]["rewards"] == [float(len(generation.token_ids)) for generation in whole]
    assert [one.tokens[-one.response_length :] for one in found] == [each.token_ids.tolist() for each in whole]
    assert all(one.rollout_routed_experts is None for one in found)
    assert args.custom_generate_function_path is None


async def test_a_failed_request_leaves_its_sample_and_ends_the_rollout(
    nats_url: str, fleet: str, sample_class: type[Any], tiny_moe_float32: Path
) -> None:
    """An error of one request reaches slime as it is, without a group around it, and no sample is half filled."""
    args = arguments(tiny_moe_float32, rollbus_nats=nats_url, rollbus_fleet=fleet, num_layers=5)
    source = Source(PROMPTS, 2, sample_class)
    groups = source.get_samples(2)
    source.buffer = groups[:]
    async with synthetic_worker(nats_url, fleet):
        with pytest.raises(InvalidRequest, match="layers"):
            await asyncio.to_thread(generate_rollout, args, 0, source)
        close(args)

    assert {sample.response_length for group in groups for sample in group} == {0}


async def test_an_update_that_a_worker_rejects_fails_the_training(
    nats_url: str, fleet: str, tiny_moes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 gets the error of the worker, and the fleet keeps its version; other ranks send nothing."""
    root = tiny_moes[0].parent
    args = arguments(tiny_moes[0], rollbus_nats=nats_url, rollbus_fleet=fleet)
    missing = str(root / "weight_v000009")
    options: dict[str, Any] = {"model_path": str(tiny_moes[0]), "weight_roots": (str(root),)}
    async with synthetic_worker(nats_url, fleet, **options), rollbus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        before = [worker.weight_version for worker in rb.fleet.workers]
        with pytest.raises(rollbus.CommandIncomplete, match="weight_v000009"):
            await asyncio.to_thread(update_weights, args, missing, [])
        monkeypatch.setenv("RANK", "1")
        await asyncio.to_thread(update_weights, args, missing, [])
        state = await rb.fleet.state()

    assert [worker.weight_version for worker in state.workers] == before


@pytest.fixture
def old(nats_url: str, tiny_moes: tuple[Path, Path], tmp_path: Path) -> Iterator[RealWorkers]:
    """Workers with version 0 of a policy."""
    workers = RealWorkers(nats_url, tiny_moes[1], version=0, cache=tmp_path / "cache")
    yield workers
    workers.stop()


def check_with_hugging_face(folder: Path, sample: Any, num_tokens: int, *, is_endless: bool = False) -> None:
    """Compare the first sampled tokens of a response, and all rows before them, with Hugging Face's model.

    Args:
        is_endless: the sampler could not choose the end-of-sequence token, because of `min_new_tokens`.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = len(sample.tokens) - sample.response_length
    ids = sample.tokens[: length + num_tokens]
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_router_logits=True)
    if is_endless:
        found.logits[..., model.config.eos_token_id] = -torch.inf
    logprobs = found.logits[0].log_softmax(-1)[length - 1 : -1]
    own = logprobs[torch.arange(num_tokens), torch.tensor(ids[length:])].numpy()
    np.testing.assert_allclose(sample.rollout_log_probs[:num_tokens], own, atol=TOLERANCE)
    logits = torch.stack(list(found.router_logits), dim=1)[:-1]
    rows = sample.rollout_routed_experts[: len(ids) - 1].long()
    assert rows.shape[0] == logits.shape[0]
    worst = logits.gather(-1, rows).amin(-1)
    assert bool((worst >= logits.topk(rows.shape[-1]).values[..., -1] - NEAR).all())
    assert all(len(set(chosen)) == rows.shape[-1] for chosen in rows.reshape(-1, rows.shape[-1]).tolist())


@pytest.mark.vllm
@pytest.mark.routing
@in_trainers_run
async def test_a_rollout_survives_a_killed_worker_and_new_weights(
    nats_url: str, old: RealWorkers, tiny_moes: tuple[Path, Path], sample_class: type[Any]
) -> None:
    """Samples have each token once, with the version, log probability and experts that Hugging Face's model gives."""
    await old.have(2)
    args = arguments(
        tiny_moes[1],
        rollbus_nats=nats_url,
        rollbus_fleet=old.fleet,
        rollout_batch_size=3,
        over_sampling_batch_size=3,
        custom_generate_function_path=f"{HERE}.long_response",
        long=LONG,
    )
    source = Source(PROMPTS, 2, sample_class)
    folder = tiny_moes[0].parent / "updates" / "weight_v000001"
    shutil.copytree(tiny_moes[0], folder, dirs_exist_ok=True)
    async with rollbus.connect(nats_url, fleet=old.fleet) as rb:
        await rb.fleet.wait_for_workers(2)
        async with asyncio.TaskGroup() as tasks:
            rollout = tasks.create_task(asyncio.to_thread(generate_rollout, args, 0, source))
            await until_state(rb, lambda state: [worker.in_flight > 0 for worker in state.workers] == [True, True])
            name, process = next(iter(old.living.items()))
            process.kill()
            process.wait()
            await asyncio.to_thread(update_weights, args, str(folder), [])
        args.custom_generate_function_path = None
        after = await asyncio.to_thread(generate_rollout, args, 1, source)
        close(args)

    before = [sample for group in rollout.result().samples for sample in group]
    workers = [sample.metadata["rollbus"]["workers"] for sample in before]
    assert any(len(served) > 1 and served[0] == name for served in workers)
    for sample in before:
        check_sample(sample, args)
        assert sample.response_length == LONG
        versions = sample.metadata["rollbus"]["weight_versions"]
        assert set(versions) == {0, 1}
        check_with_hugging_face(tiny_moes[1], sample, versions.count(0), is_endless=True)
    for sample in (sample for group in after.samples for sample in group):
        check_sample(sample, args)
        assert sample.weight_versions == ["1"]
        check_with_hugging_face(tiny_moes[0], sample, sample.response_length)
