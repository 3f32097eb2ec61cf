"""The functions that slime and vime call for rollouts: the answer to one sample, and a whole rollout or evaluation.

What is read in the packages, beside the arguments: `<package>.rollout.base_types`, `.rollout.rm_hub` for rewards,
`.utils.async_utils.run`, on whose loop reward functions run, and `.rollout.sglang_rollout` or `.rollout.vllm_rollout`
for evaluations.
"""

import asyncio
import copy
import functools
import importlib
import logging
import sys
import uuid
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from ...bus.client.generation import Generation
from ...schemas.errors import InvalidRequest
from ...schemas.request import GenerateRequest
from .connection import Settings, read_settings, shared_client
from .samples import fill, prompt_of, request_of, sampling_of, set_status

logger = logging.getLogger(__name__)

GENERATE: Final = "rollbus.integrations.slime.generate"
PACKAGES: Final = {"slime": "rollout.sglang_rollout", "vime": "rollout.vllm_rollout"}
"""The module with the package's own rollout function, by package."""
MAX_STOPS: Final = 16
"""Maximum number of interruptions of a response, for example by `pause --mode abort`. After that, its group is not
trained."""
FINISHED: Final = ("COMPLETED", "TRUNCATED")


@functools.cache
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    # The trainer has loaded this tokenizer, and its code, before.
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


_running: ContextVar[set[str] | None] = ContextVar("rollbus_slime_running", default=None)
"""Ids of the requests of this rollout that have no answer yet. None outside of `generate_rollout`."""


async def _complete(settings: Settings, request: GenerateRequest) -> Generation:
    ids = _running.get()
    if ids is None:
        ids = set()
    ids.add(request.request_id)
    try:
        return await shared_client(settings).with_asyncio.complete(request)
    finally:
        ids.discard(request.request_id)


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """Generate the rest of a sample's response, for `--custom-generate-function-path`. Return the sample.

    A request whose worker dies resumes on another worker. A sample that was aborted continues from its tokens. Agents
    may call this for each turn, after they have appended their own tokens to the sample.

    Args:
        args: slime's arguments, with `rollbus_nats`, `rollbus_fleet`, `rollbus_model`, `rollbus_credentials`,
            `rollbus_timeout_s` and `rollbus_concurrency` from `--custom-config-path`.
        sample: its tokens, log probabilities, rows, versions and status are set.
        sampling_params: slime's parameters of the whole response.
        evaluation: True: without rows and masks.

    Raises:
        InvalidRequest: an argument, a parameter or the sample is wrong, or the answer does not fit the trainer's model.
        RequestError: the request failed. The sample is unchanged.
    """
    settings = read_settings(args)
    sampling = sampling_of(sampling_params, int(sample.response_length))
    if sampling is None:
        set_status(sample, "TRUNCATED")
        return sample
    tokenizer = _tokenizer(args.hf_checkpoint)
    tokens = prompt_of(sample, lambda text: tokenizer.encode(text, add_special_tokens=False))
    request = request_of(args, sample, sampling, tokens, settings, evaluation=evaluation)
    generation = await _complete(settings, request)
    skips = sampling_params.get("skip_special_tokens")
    text = tokenizer.decode(generation.token_ids.tolist(), skip_special_tokens=True if skips is None else bool(skips))
    fill(args, sample, generation, text)
    return sample


@dataclass
class _Rollout:
    """One call of `generate_rollout`: the groups that slime's loop also counts."""

    args: Any
    package: str
    settings: Settings
    is_stopping: bool = False
    num_counted: int = 0
    """Groups that run or are kept."""
    kept: list[list[Any]] = field(default_factory=list)
    complete: list[list[Any]] = field(default_factory=list)
    """Groups that were complete before the rollout had enough, also those that the filter dropped."""
    surplus: list[list[Any]] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    """Ids of the requests that have no answer yet."""

    def __post_init__(self) -> None:
        args = self.args
        self.slots = asyncio.Semaphore(self.settings.concurrency)
        self.filter = load(args.dynamic_sampling_filter_path)
        self.params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
        }

    @property
    def wanted(self) -> int:
        return int(self.args.rollout_batch_size)

    async def run(self, source: Any) -> None:
        """Run groups until enough are kept, and abort the others."""
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[list[Any]]] = set()
            while len(self.kept) < self.wanted:
                while self.num_counted < self.wanted:
                    groups = source.get_samples(self.args.over_sampling_batch_size)
                    if not groups:
                        raise InvalidRequest(
                            field="data_source", problem="returned no samples", allowed="1 group or more"
                        )
                    running |= {tasks.create_task(self.run_group(group)) for group in groups}
                    self.num_counted += len(groups)
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self.keep(task.result())
            self.is_stopping = True
            while running:
                if self.ids:
                    # Each request ends with the tokens that it has.
                    await shared_client(self.settings).with_asyncio.abort(list(self.ids))
                # A sample may be between its own turns now, and send its next request later.
                done, running = await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                self.surplus += [task.result() for task in done]

    def keep(self, group: list[Any]) -> None:
        """Count a complete group, and keep it unless it is filtered or surplus."""
        if not all(_is_finished(sample) for sample in _leaves(group)):
            # Its responses were interrupted too often. The data source gets it back, and another group runs.
            self.surplus.append(group)
            self.num_counted -= 1
            return
        self.complete.append(group)
        found = None if self.filter is None else self.filter(self.args, group)
        is_kept = found is None or bool(getattr(found, "keep", found))
        if not is_kept and not (getattr(found, "keep_when_insufficient", False) and self.num_counted <= self.wanted):
            reason = getattr(found, "reason", None)
            if reason:
                self.dropped[reason] = self.dropped.get(reason, 0) + 1
            self.num_counted -= 1
        elif len(self.kept) < self.wanted:
            self.kept.append(group)
        else:
            self.surplus.append(group)

    async def run_group(self, group: list[Any]) -> list[Any]:
        """Generate all samples of a group and compute their rewards."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.run_sample(sample, number)) for number, sample in enumerate(group)]
        found = [task.result() for task in running]
        if self.args.group_rm and all(map(_is_finished, _leaves(found))):
            hub = importlib.import_module(f"{self.package}.rollout.rm_hub")
            for sample, reward in zip(found, await hub.batched_async_rm(self.args, found), strict=True):
                sample.reward = reward
        return found

    async def run_sample(self, sample: Any, number: int) -> Any:
        """Generate one sample of a group; a function of the user may return several samples for it."""
        args = self.args
        if sample.session_id is None:
            sample.session_id = str(uuid.uuid4())
        if _is_finished(sample):
            return sample
        if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
            sample.loss_mask = [0] * sample.response_length
        params = dict(self.params)
        if any(getattr(args, f"{engine}_enable_deterministic_inference", False) for engine in ("sglang", "vllm")):
            params["sampling_seed"] = args.rollout_seed + number
        path = getattr(sample, "generate_function_path", None) or args.custom_generate_function_path or GENERATE
        function = generate if path == GENERATE else load(path)
        found = sample
        async with self.slots:
            for _ in range(MAX_STOPS):
                if self.is_stopping:
                    set_status(sample, "ABORTED")
                    return sample
                found = await function(args, sample, dict(params))
                if isinstance(found, list) or found.status.name != "ABORTED":
                    break
        for each in () if args.group_rm else _leaves([found]):
            if each.reward is None and _is_finished(each):
                hub = importlib.import_module(f"{self.package}.rollout.rm_hub")
                each.reward = await hub.async_rm(args, each)
        return found


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the samples of a rollout or of an evaluation: `--rollout-function-path`, `--eval-function-path`.

    A rollout takes groups from the data source until `rollout_batch_size` of them are complete and pass the filter. It
    aborts the others; with `--partial-rollout` they go back to the data source with the tokens that they have. An
    evaluation runs the package's own loop with this package's `generate`.

    Raises:
        InvalidRequest: an argument is wrong, or the data source has no samples.
        RequestError: a request failed.
    """
    package = _package_of(data_source)
    if getattr(args, "rollout_sample_hook_path", None):
        problem, allowed = "is set", f"unset; or the package's rollout function with {GENERATE}"
        raise InvalidRequest(field="rollout_sample_hook_path", problem=problem, allowed=allowed)
    if evaluation:
        own = copy.copy(args)
        own.custom_generate_function_path = args.custom_generate_function_path or GENERATE
        # The package multiplies its concurrency by this number, which is 0 without engines of its own.
        own.rollout_num_engines = max(1, getattr(args, "rollout_num_engines", None) or 0)
        module = importlib.import_module(f"{package}.{PACKAGES.get(package, PACKAGES['slime'])}")
        return module.generate_rollout(own, rollout_id, data_source, evaluation=True)
    run = importlib.import_module(f"{package}.utils.async_utils").run
    rollout: _Rollout = run(_rollout(args, package, data_source))
    kept = sorted(rollout.kept, key=_index)
    if args.partial_rollout:
        for sample in _leaves(rollout.surplus):
            if sample.response_length:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
        data_source.add_samples(rollout.surplus)
    for path, values in (
        (args.rollout_sample_filter_path, (args, kept)),
        (args.rollout_all_samples_process_path, (args, sorted(rollout.complete, key=_index), data_source)),
    ):
        if (function := load(path)) is not None:
            function(*values)
    logger.info("slime.rollout_ended rollout=%d groups=%d surplus=%d", rollout_id, len(kept), len(rollout.surplus))
    metrics = {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in rollout.dropped.items()}
    output = importlib.import_module(f"{package}.rollout.base_types").RolloutFnTrainOutput
    return output(samples=kept, metrics=metrics)


async def _rollout(args: Any, package: str, source: Any) -> _Rollout:
    rollout = _Rollout(args, package, read_settings(args))
    _running.set(rollout.ids)
    try:
        await rollout.run(source)
    except BaseExceptionGroup as group:
        # slime logs the error that it gets: a group would hide the reason.
        raise _first(group) from None
    return rollout


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def load(path: str | None) -> Any:
    """Return the function of a path such as `module.function`; None: None."""
    if not path:
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _package_of(data_source: Any) -> str:
    """Return the name of the package that calls: that of the data source's class, or the one that is loaded."""
    bases = [base.__module__.partition(".")[0] for base in type(data_source).__mro__]
    found = [name for name in PACKAGES if name in bases] or [name for name in PACKAGES if name in sys.modules]
    if not found:
        allowed = f"an object of {' or '.join(PACKAGES)}"
        raise InvalidRequest(field="data_source", problem=f"is {type(data_source).__name__}", allowed=allowed)
    return found[0]


def _leaves(samples: Iterable[Any]) -> list[Any]:
    """Return the samples in groups of any depth."""
    return [leaf for each in samples for leaf in (_leaves(each) if isinstance(each, list) else [each])]


def _index(group: list[Any]) -> int:
    return int(_leaves(group)[0].index)


def _is_finished(sample: Any) -> bool:
    return sample.status.name in FINISHED
