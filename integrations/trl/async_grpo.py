"""A rollout worker and a weight transfer for TRL's `AsyncGRPOTrainer`: a fleet answers and receives the policy.

They implement `RolloutWorkerProtocol` and `WeightTransferProtocol` of `trl.experimental.async_grpo`.
"""

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from ... import sync
from ...bus.client.generation import Generation
from ...schemas.checks import check_int
from ...schemas.chunk import FinishReason
from ...schemas.errors import InvalidRequest
from ...schemas.limits import MAX_N
from ...schemas.request import GenerateRequest
from ...schemas.sampling import SamplingParams
from ...trainer.losses import group_advantages
from ..publisher import PolicyPublisher
from .grpo import seeded, token_ids_of

logger = logging.getLogger(__name__)

STOP_S: Final = 15.0
"""Seconds for the thread to end, the same time that TRL gives its own thread."""
FULL_WAIT_S: Final = 0.2
"""Seconds between two checks for a stop, while the thread waits for room in the queue."""
MAX_METRICS: Final = 1024
"""Maximum number of measurements that wait for the trainer's next log. Later ones are dropped."""
UNFINISHED: Final = frozenset({FinishReason.ERROR, FinishReason.ABORT})
"""Finish reasons that exclude a group from training. An aborted answer is no sample of the policy."""
NO_TEXT: Final = frozenset({"prompt", "completion", "completion_ids"})
"""Columns of a dataset that reward functions receive under other names."""

Reward = Callable[..., Any]


class WeightTransfer(PolicyPublisher):
    """Publishes the policy to the fleet during generation: deltas, staged while workers serve, and one short pause.

    Args:
        url: URL of the NATS server. None: as in `rollbus.connect`.
        policy: returns the trainer's model; its tensors are published under the names of its checkpoint. None: TRL's
            names are published. They are correct for models without experts whose parameters are all trained.
        settings: further arguments of `PolicyPublisher`: `model`, `checkpoint`, and arguments of `rollbus.connect`.
    """

    def __init__(self, url: str | None = None, *, policy: Callable[[], Any] | None = None, **settings: Any) -> None:
        super().__init__(url, **settings)
        self._policy = policy

    def init_weight_transfer(self) -> None:
        """Wait for a worker, and acquire the publisher lease of this model."""
        self.open()

    def pause(self) -> None:
        """Do nothing. Workers serve while they stage, and pause for the switch on their own."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish a version. The iterator is consumed to its end, because other ranks wait in it."""
        if self._policy is None:
            self.publish(iterator)
            return
        for _ in iterator:
            pass
        self.publish_model(self._policy())

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def destroy(self) -> None:
        """Release the lease."""
        self.close()


class RolloutWorker:
    """Sends the prompts of a dataset to the fleet repeatedly, computes rewards, and puts the samples into a queue.

    A group is one request with `num_generations` samples. The `model_version` of a sample is the version of its oldest
    token. The worker has its own thread. Reward functions on it share the interpreter with the trainer.

    Args:
        url: URL of the NATS server. None: as in `rollbus.connect`.
        model: served name of the model.
        dataset: rows with `prompt`, a string or messages. The reward functions receive its other columns.
        reward_funcs: functions or coroutine functions, called as by TRL with `prompts`, `completions`, `completion_ids`
            and the columns of the row, each a list. They return a number or None for each completion.
        tokenizer: transformers tokenizer of the model.
        sampling: sampling parameters of completions. The worker sets `n`.
        num_generations: samples in a group (default: 8).
        max_groups: groups in flight (default: 16).
        queue_size: maximum number of samples that wait for the trainer (default: 1024). Then the worker waits.
        transfer: transfer whose versions the trainer counts. None: the trainer's versions are those of the fleet.
        options: further arguments of `rollbus.connect`.

    Attributes:
        rollout_buffer: queue of `RolloutSample`.
        metrics_queue: queue of maps from a metric's name to a number or to (numerator, denominator).
    """

    def __init__(  # noqa: PLR0913 - only the caller knows these values
        self,
        url: str | None = None,
        *,
        model: str | None = None,
        dataset: Sequence[Mapping[str, Any]],
        reward_funcs: Sequence[Reward],
        tokenizer: Any,
        sampling: SamplingParams,
        num_generations: int = 8,
        max_groups: int = 16,
        queue_size: int = 1024,
        transfer: WeightTransfer | None = None,
        **options: Any,
    ) -> None:
        self._url = url
        self._model = model
        self._dataset = dataset
        if len(dataset) == 0:
            raise InvalidRequest(field="dataset", problem="is empty", allowed="1 row or more")
        self._reward_funcs = list(reward_funcs)
        if not self._reward_funcs:
            raise InvalidRequest(field="reward_funcs", problem="is empty", allowed="1 function or more")
        self._tokenizer = tokenizer
        num_generations = check_int("num_generations", num_generations, 1, MAX_N)
        if sampling.logprobs is None:
            raise InvalidRequest(field="sampling.logprobs", problem="is None", allowed="0 or more: the loss needs them")
        fields = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
        self._sampling = SamplingParams(**fields | {"n": num_generations})
        self._max_groups = check_int("max_groups", max_groups, 1, 1_000_000)
        self._transfer = transfer
        self._options = options
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(check_int("queue_size", queue_size, 1, 2**31))
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(MAX_METRICS)
        self._thread: threading.Thread | None = None
        self._exits = ExitStack()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._beat = time.monotonic()
        self._lead = 0
        self._rows: dict[str, tuple[int, Mapping[str, Any]]] = {}

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<RolloutWorker groups={len(self._rows)} waiting={self.rollout_buffer.qsize()}>"

    def start(self) -> None:
        """Connect and start. This has no effect if the worker runs.

        Raises:
            BusBroken: no server answers.
            RuntimeError: an earlier `stop` has not ended, because a reward function has not returned.
        """
        if self._stopping.is_set():
            if self._thread is not None and self._thread.is_alive():
                raise RuntimeError("the rollout worker is still stopping: a reward function has not returned")
            self._thread = None
            self._stopping.clear()
        if self._thread is None:
            self._error = None
            client = self._exits.enter_context(sync.connect(self._url, **self._options))
            self._beat = time.monotonic()
            self._thread = threading.Thread(target=self._run, args=(client,), name="rollbus-rollouts", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Abort all requests in flight and stop. This has no effect if the worker does not run."""
        self._stopping.set()
        self._exits.close()
        if self._thread is not None:
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                logger.warning(
                    "rollouts.stop_timed_out seconds=%g reason=%s", STOP_S, "a reward function has not returned"
                )
                return
            self._thread = None
        self._stopping.clear()

    def update_model_version(self, model_version: int) -> None:
        """Set the trainer's present version, which is the version of the last transfer."""
        if self._transfer is not None and self._transfer.version is not None:
            self._lead = self._transfer.version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Check that the worker has not failed, and has finished a group within the last `stale_after_s` seconds.

        Raises:
            RuntimeError: the check failed. The cause is the error of the worker, if it has failed.
        """
        if self._error is not None:
            raise RuntimeError(f"the rollout worker has failed: {self._error}") from self._error
        age = time.monotonic() - self._beat
        if self._thread is not None and age > stale_after_s:
            raise RuntimeError(f"no group of completions was finished for {age:.0f} s; allowed: {stale_after_s:.0f} s")

    # The methods below run on the worker's thread.

    def _run(self, client: sync.BlockingClient) -> None:
        try:
            with closing(client.complete_many(self._requests(), max_in_flight=self._max_groups)) as generations:
                for generation in generations:
                    group, row = self._rows.pop(generation.request_id)
                    if any(answer.finish_reason in UNFINISHED for answer in (generation, *generation.siblings)):
                        # Do not update `_beat`: the trainer must notice a fleet in which every group fails.
                        self._skip(generation)
                        continue
                    self._beat = time.monotonic()
                    if not self._put(self._samples(group, row, generation)):
                        return
        except BaseException as error:
            # Boundary of the thread: `check_health` reports any error of the reward functions to the trainer.
            if not self._stopping.is_set():
                logger.exception("rollouts.failed error=%s", error)
                self._error = error
        finally:
            self._rows.clear()

    def _requests(self) -> Iterator[GenerateRequest]:
        group = 0
        while not self._stopping.is_set():
            row = self._dataset[group % len(self._dataset)]
            [ids] = token_ids_of([row["prompt"]], self._tokenizer)
            sampling = seeded(self._sampling, group * self._sampling.n)
            request = GenerateRequest(prompt_token_ids=ids, sampling=sampling, model=self._model)
            self._rows[request.request_id] = group, row
            yield request
            group += 1

    def _skip(self, generation: Generation) -> None:
        if isinstance(generation.error, InvalidRequest):
            raise generation.error
        problem = generation.error or "stopped from outside"
        logger.warning("rollouts.group_failed request=%r error=%s", generation.request_id, problem)
        self._measure({"rollout/failed_groups_total": 1.0})

    def _samples(self, group: int, row: Mapping[str, Any], generation: Generation) -> list[RolloutSample]:
        answers = (generation, *generation.siblings)
        prompt_ids = np.asarray(generation.request.prompt_token_ids)
        texts = self._tokenizer.batch_decode([answer.token_ids for answer in answers], skip_special_tokens=True)
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        is_text = isinstance(row["prompt"], str)
        rewards, by_function = self._rewards(row, texts if is_text else messages, answers)
        prompt = [{"role": "user", "content": row["prompt"]}] if is_text else list(row["prompt"])
        lengths = [len(answer.token_ids) for answer in answers]
        self._measure({"completions/mean_length": (float(sum(lengths)), float(len(lengths)))})
        scored = rewards[~np.isnan(rewards)]
        metrics = {"reward_std": float(scored.std()) if len(scored) else float("nan")}
        advantages = _advantages(rewards)
        return [
            RolloutSample(
                prompt=prompt,
                completion=messages[i],
                input_ids=np.concatenate([prompt_ids, answer.token_ids]).astype(np.int64),
                completion_mask=np.repeat(np.array([0, 1], np.int64), [len(prompt_ids), lengths[i]]),
                old_log_probs=np.concatenate([np.zeros(len(prompt_ids), np.float32), _logprobs(answer)]),
                advantage=float(advantages[i]),
                model_version=int(answer.weight_versions.min()) - self._lead,
                group_id=group,
                metrics=metrics | {name: float(values[i]) for name, values in by_function.items()},
                enqueued_at=time.time(),
            )
            for i, answer in enumerate(answers)
            if lengths[i]
        ]

    def _rewards(
        self, row: Mapping[str, Any], completions: Sequence[Any], answers: Sequence[Generation]
    ) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """Return the summed rewards of the answers, and the rewards by function; NaN if no function gave a reward."""
        count = len(answers)
        columns = {name: [value] * count for name, value in row.items() if name not in NO_TEXT}
        found: dict[str, npt.NDArray[Any]] = {}
        for function in self._reward_funcs:
            given = function(
                prompts=[row["prompt"]] * count,
                completions=list(completions),
                completion_ids=[answer.token_ids.tolist() for answer in answers],
                **columns,
            )
            given = asyncio.run(given) if inspect.iscoroutine(given) else given
            name = getattr(function, "__name__", type(function).__name__)
            if len(given) != count:
                problem = f"has {len(given)} values from {name}"
                raise InvalidRequest(field="rewards", problem=problem, allowed=f"{count}: one for each completion")
            found[f"rewards/{name}"] = np.array([np.nan if r is None else r for r in given], dtype=float)
        each = np.array(list(found.values()))
        rewards = np.where(np.isnan(each).all(0), np.nan, np.nansum(each, 0))
        return rewards, found | {"reward": rewards}

    def _put(self, samples: Sequence[RolloutSample]) -> bool:
        """Put samples into the queue when it has room. Return False if the worker must stop."""
        for sample in samples:
            while True:
                self._beat = time.monotonic()
                if self._stopping.is_set():
                    return False
                try:
                    self.rollout_buffer.put(sample, timeout=FULL_WAIT_S)
                    break
                except queue.Full:
                    continue
        return True

    def _measure(self, metrics: dict[str, Any]) -> None:
        with suppress(queue.Full):
            self.metrics_queue.put_nowait(metrics)


def _logprobs(answer: Generation) -> npt.NDArray[Any]:
    return np.full(len(answer.token_ids), np.nan, np.float32) if answer.logprobs is None else answer.logprobs


def _advantages(rewards: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return TRL's advantages of a group: 0 for an answer without a reward."""
    scored = ~np.isnan(rewards)
    advantages = np.zeros_like(rewards)
    if scored.any():
        advantages[scored] = group_advantages(rewards[scored], eps=1e-8)
    return advantages
