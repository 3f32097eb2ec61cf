"""Stand-ins for what the adapter uses of slime, which has no release on PyPI. Written by us from its names.

Source: THUDM/slime, commit 624b824a898ab0ec1fcb4d373004c7f3852bf515. vllm-project/vime, commit
2b83ea209634051243693e8186f45f449acb4cd1, has the same names.

- `slime/utils/types.py`: `Sample`, its fields, `Sample.Status` and `PrefixCacheInfo`;
- `slime/rollout/base_types.py`: `RolloutFnTrainOutput`, `RolloutFnEvalOutput`;
- `slime/rollout/rm_hub/__init__.py`: `async_rm`, `batched_async_rm`;
- `slime/rollout/data_source.py`: `get_samples`, `add_samples`;
- `slime/rollout/sglang_rollout.py`: `generate_rollout` for an evaluation, which calls the custom function of a sample;
- `slime/utils/async_utils.py`: `run`, which runs a coroutine on a loop of its own;
- `slime/utils/arguments.py`: the names in `arguments`.

`ROLLBUS_TEST_SLIME=DIRECTORY` runs the tests with a checkout of slime instead.
"""

import asyncio
import copy
import importlib
import inspect
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CHECKOUT = "ROLLBUS_TEST_SLIME"
ROLLOUT = "slime.rollout.sglang_rollout"


@dataclass
class CacheInfo:
    """Counts of prompt tokens."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0


class Status(Enum):
    """Where a sample stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """The fields of slime's sample that the adapter and the tests use."""

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    status: Any = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    session_id: str | None = None
    prefix_cache_info: Any = field(default_factory=CacheInfo)


@dataclass
class TrainOutput:
    """What a rollout function returns."""

    samples: list[list[Any]]
    metrics: Any = None


@dataclass
class EvalOutput:
    """What an evaluation returns."""

    data: dict[str, dict[str, Any]]
    metrics: Any = None


def load(path: str) -> Callable[..., Any]:
    """Return the function of a path."""
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


async def async_rm(args: Namespace, sample: Any) -> Any:
    """Return the reward of a sample by the function of the arguments."""
    return await load(sample.custom_rm_path or args.custom_rm_path)(args, sample)


async def batched_async_rm(args: Namespace, samples: Sequence[Any]) -> Any:
    """Return the rewards of a group."""
    return await load(args.custom_rm_path)(args, samples)


def evaluate(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> EvalOutput:
    """Evaluate the samples in `args.eval_datasets`, as the package's own loop does with a custom function."""
    assert evaluation
    assert args.rollout_num_engines > 0
    function = load(args.custom_generate_function_path)
    assert "evaluation" in inspect.signature(function).parameters
    [dataset] = args.eval_datasets
    params = {"temperature": dataset.temperature, "top_p": 1.0, "top_k": -1, "max_new_tokens": dataset.max_response_len}

    async def one(sample: Any) -> Any:
        found = await function(args, sample, dict(params, stop=None, no_stop_trim=True), evaluation=True)
        found.reward = await async_rm(args, found)
        return found

    async def every() -> list[Any]:
        return [await one(copy.deepcopy(sample)) for sample in dataset.samples]

    found = run(every())
    rewards = [sample.reward for sample in found]
    truncated = [sample.status.name == "TRUNCATED" for sample in found]
    return EvalOutput({dataset.name: {"rewards": rewards, "truncated": truncated, "samples": found}})


_loops: list[asyncio.AbstractEventLoop] = []


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a loop that lasts as long as the process."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
        threading.Thread(target=_loops[0].run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _loops[0]).result()


class Source:
    """A data source with a buffer: groups that were added come back before new ones."""

    def __init__(self, prompts: Sequence[str], num_samples: int, sample: type[Any]) -> None:
        self.prompts = list(prompts)
        self.num_samples = num_samples
        self.sample = sample
        self.buffer: list[list[Any]] = []
        self.num_groups = 0

    def get_samples(self, count: int) -> list[list[Any]]:
        """Return groups, first those of the buffer."""
        found, self.buffer = self.buffer[:count], self.buffer[count:]
        while len(found) < count and self.prompts:
            group, self.num_groups = self.num_groups, self.num_groups + 1
            text = self.prompts[group % len(self.prompts)]
            numbers = range(group * self.num_samples, (group + 1) * self.num_samples)
            found.append([self.sample(group_index=group, index=number, prompt=text) for number in numbers])
        return found

    def add_samples(self, groups: list[list[Any]]) -> None:
        """Put groups back."""
        assert all(len(group) == self.num_samples for group in groups)
        self.buffer += groups


def install(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """Make `slime` importable in this test, and return its class of samples."""
    checkout = os.environ.get(CHECKOUT)
    if checkout is not None:
        monkeypatch.syspath_prepend(checkout)
        return importlib.import_module("slime.utils.types").Sample  # type: ignore[no-any-return]
    contents: Mapping[str, Mapping[str, object]] = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.async_utils": {"run": run},
        "slime.rollout": {},
        "slime.rollout.base_types": {"RolloutFnTrainOutput": TrainOutput, "RolloutFnEvalOutput": EvalOutput},
        "slime.rollout.rm_hub": {"async_rm": async_rm, "batched_async_rm": batched_async_rm},
        ROLLOUT: {"generate_rollout": evaluate},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return Sample


def arguments(checkpoint: object, **changes: Any) -> Namespace:
    """Return the arguments that the adapter reads, for the tiny MoE."""
    names: dict[str, Any] = {
        "hf_checkpoint": str(checkpoint),
        "num_layers": 4,
        "moe_router_topk": 4,
        "num_experts": 16,
        "use_rollout_routing_replay": True,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 12,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 42,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "group_rm": False,
        "rm_type": None,
        "custom_rm_path": "tests.integrations.slime_standin.length_reward",
        "custom_generate_function_path": None,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "update_weight_mode": "full",
    }
    return Namespace(**{**names, **changes})


async def length_reward(args: Namespace, sample: Any) -> float:
    """Return the length of a response, as a reward."""
    return float(sample.response_length)


def dataset(samples: Sequence[Any], **changes: Any) -> SimpleNamespace:
    """Return a data set of an evaluation."""
    return SimpleNamespace(**{"name": "test", "samples": samples, "temperature": 0.0, "max_response_len": 6, **changes})
