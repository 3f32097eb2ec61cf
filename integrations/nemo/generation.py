"""NeMo-RL's `GenerationInterface` over a fleet, and its `WeightSynchronizer` over published weights.

The methods are those of NeMo-RL at commit 7ea279a. NeMo-RL itself is not imported: batches have the class of the batch
that the trainer passes.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from ... import sync
from ...bus.client.generation import Generation
from ...schemas.errors import InvalidRequest, NoWorkers
from ...schemas.presence import Capabilities, WorkerPresence
from ...schemas.request import GenerateRequest
from ..publisher import WORKERS_WAIT_S, PolicyPublisher, tensor_slices, update_fleet
from .batches import Prompt, Unfinished, batch_of, prompts_of, request_of

Weights = Iterable[tuple[str, torch.Tensor]] | Path
"""All tensors of the policy as (name, tensor), named as in the checkpoint; or the folder of a whole checkpoint."""


class RollbusGeneration:
    """Generates for NeMo-RL on a fleet. The fleet has its own GPUs, so nothing sleeps or wakes for training.

    Args:
        config: NeMo-RL's generation config: `max_new_tokens`, `temperature`, `top_p`, `top_k`, `_pad_token_id`, and
            optionally `stop_token_ids` and `stop_strings`.
        url: URL of the NATS server. None: as in `rollbus.connect`.
        model: served name of the model. None: the only model of the fleet.
        checkpoint: folder of the checkpoint with which training began. Refits need it.
        tokenizer: transformers tokenizer. Stop strings need it.
        options: further arguments of `rollbus.connect`.

    Attributes:
        cfg: the generation config, which NeMo-RL reads here.
        weight_synchronizer: NeMo-RL refits with it. Set it to a `RollbusWeights`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        url: str | None = None,
        *,
        model: str | None = None,
        checkpoint: Path | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        for name in ("max_new_tokens", "temperature", "top_p", "top_k", "_pad_token_id"):
            if name not in config:
                raise InvalidRequest(field=f"config.{name}", problem="is missing", allowed="a value, as in NeMo-RL")
        self.cfg = dict(config)
        self.weight_synchronizer: RollbusWeights | None = None
        self._url, self._model, self._checkpoint, self._tokenizer = url, model, checkpoint, tokenizer
        self._options = options
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._exits = ExitStack()
        self._client: sync.BlockingClient | None = None
        self._publisher: PolicyPublisher | None = None
        self._monitor: Any = None

    def __repr__(self) -> str:
        """Return one line with the state."""
        state = "not connected" if self._client is None else repr(self._client)
        return f"<RollbusGeneration model={self._model} {state}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments only. A copy in another process, such as a Ray actor, has its own connection."""
        own = {"_lock", "_exits", "_client", "_publisher", "_monitor", "weight_synchronizer"}
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which connects at its first use and cannot refit."""
        vars(self).update(state)
        self.weight_synchronizer = None
        self._reset()

    # Generation.

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Return the generations of a batch, in its order and its class. See `prompts_of` and `batch_of`.

        Raises:
            InvalidRequest: the batch or the config is not allowed.
            RequestError: a generation failed. The others were aborted.
            NoWorkers: no worker served the model within ten minutes.
        """
        prompts, requests, capabilities = self._requests(data, greedy)
        whole = Unfinished(requests)
        found: dict[int, Generation] = {}
        with self._reported():
            for sent in whole.rounds():
                # Close the iterator here, so that a failed step leaves no request open.
                with closing(self._connected().complete_many(sent, max_in_flight=len(sent))) as answers:
                    found |= dict(filter(None, map(whole.take, answers)))
        return self._batch(data, prompts, [found[number] for number in range(len(requests))], capabilities)

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield (index, batch of one sample) as samples finish. Errors are those of `generate`.

        If the caller leaves the loop, the fleet aborts the samples that are not finished.
        """
        # On a thread, because the first call connects and may wait for a worker.
        prompts, requests, capabilities = await asyncio.to_thread(self._requests, data, greedy)
        whole = Unfinished(requests)
        with self._reported():
            for sent in whole.rounds():
                answers = self._connected().with_asyncio.complete_many(sent, max_in_flight=len(sent))
                async with aclosing(answers):
                    async for answer in answers:
                        if ended := whole.take(answer):
                            yield ended[0], self._batch(data, [prompts[ended[0]]], [ended[1]], capabilities)

    def _requests(self, data: Any, greedy: bool) -> tuple[list[Prompt], list[GenerateRequest], Capabilities]:
        prompts, capabilities = prompts_of(data, self.cfg), self._capabilities()
        if self._tokenizer is None and any(prompt.stop_strings for prompt in prompts):
            allowed = "none without `tokenizer`; `stop_token_ids` of the config need none"
            raise InvalidRequest(field="stop_strings", problem="are set", allowed=allowed)
        requests = [request_of(prompt, self.cfg, capabilities, greedy=greedy, model=self._model) for prompt in prompts]
        return prompts, requests, capabilities

    def _batch(
        self, data: Any, prompts: Sequence[Prompt], generations: Sequence[Generation], capabilities: Capabilities
    ) -> Any:
        decode = None if self._tokenizer is None else self._tokenizer.decode
        pad = self.cfg["_pad_token_id"]
        return type(data)(batch_of(data, prompts, generations, pad=pad, capabilities=capabilities, decode=decode))

    # Life.

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Connect and wait for a worker. Return True. Arguments, which are for engines that sleep, have no effect."""
        self._capabilities()
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Return True. The fleet has its own GPUs, and its cache holds entries of each weight version apart."""
        return True

    def shutdown(self) -> bool:
        """Release the lease on weights and close the connection. The workers continue. Repeated calls are allowed."""
        with self._lock:
            publisher, self._publisher, self._client = self._publisher, None, None
            if publisher is not None:
                publisher.close()
            self._exits.close()
        return True

    @property
    def requires_kv_scale_sync(self) -> bool:
        """False: each worker has the scales of its checkpoint."""
        return False

    def blocks_training(self) -> bool:
        """Return False: no GPU is shared with training."""
        return False

    def wake_carries_weight_updates(self) -> bool:
        """Return False: only a refit brings new weights."""
        return False

    # Weights.

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """Check that the trainer's tensors have the names and shapes of the checkpoint.

        Args:
            state_dict_info: (shape, dtype) of each tensor by name.

        Raises:
            InvalidRequest: there is no checkpoint, or a name or shape differs from it.
        """
        checkpoint = self._needed_checkpoint()
        shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensor_slices(checkpoint)}
        given = {name: tuple(info[0]) for name, info in state_dict_info.items()}
        for name in sorted(given.keys() | shapes.keys()):
            if given.get(name) != shapes.get(name):
                problem = f"has {name} with the shape {given.get(name)}"
                raise InvalidRequest(
                    field="state_dict_info", problem=problem, allowed=f"{shapes.get(name)}, as on disk"
                )

    def refit(self, weights: Weights) -> int:
        """Give the fleet new weights and return their version. Every live worker has then loaded and verified them.

        Args:
            weights: all tensors, of which only changes are transferred, or a folder below a weight root of the workers.

        Raises:
            InvalidRequest, ControlError, CommandIncomplete, NoWorkers: as `PolicyPublisher.publish`.
        """
        if isinstance(weights, Path):
            workers = self._workers()
            version = 1 + max(worker.weight_version for worker in workers)
            update_fleet(self._connected(), path=weights, version=version, model=workers[0].model)
        else:
            version = self._needed_publisher().publish(weights).version
        if self._monitor is not None:
            self._monitor.report_refit(0, weight_version=version)
        return version

    def invalidate_kv_cache(self) -> bool:
        """Flush the prefix caches of all workers and return True.

        Raises:
            CommandIncomplete: a worker has not flushed its cache.
        """
        self._connected().fleet.flush_cache(model=self._workers()[0].model)
        return True

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Any]:
        """Raise NotImplementedError: weights come by `weight_synchronizer`."""
        raise NotImplementedError("rollbus has no collective of trainer and workers; set weight_synchronizer")

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        """Raise NotImplementedError: weights come by `weight_synchronizer`."""
        raise NotImplementedError("rollbus shares no GPU with the trainer; set weight_synchronizer")

    def update_weights_from_collective(self) -> list[Any]:
        """Raise NotImplementedError: weights come by `weight_synchronizer`."""
        raise NotImplementedError("rollbus has no collective of trainer and workers; set weight_synchronizer")

    def prepare_nccl_reshard_refit_info(self, refit_info: dict[str, Any]) -> None:
        """Raise NotImplementedError: weights come by `weight_synchronizer`."""
        raise NotImplementedError("rollbus has no NCCL resharding; set weight_synchronizer")

    def nccl_reshard_refit(self) -> list[Any]:
        """Raise NotImplementedError: weights come by `weight_synchronizer`."""
        raise NotImplementedError("rollbus has no NCCL resharding; set weight_synchronizer")

    def get_collective_sender_spec(self) -> Any:
        """Raise NotImplementedError: weights come by `weight_synchronizer`."""
        raise NotImplementedError("rollbus has no collective of trainer and workers; set weight_synchronizer")

    def get_inference_world_size(self) -> int | None:
        """Return None: no collective has a size."""
        return None

    # Health.

    def attach_fleet_health(self, monitor: Any, selector: Any) -> None:
        """Report failures, successes and refits to NeMo-RL's monitor. The fleet is one shard.

        The selector is not used: rollbus chooses the worker of each request and resumes requests of lost workers.

        Raises:
            InvalidRequest: the monitor has several shards.
        """
        if monitor.shard_count != 1:
            problem = f"has {monitor.shard_count} shards"
            raise InvalidRequest(field="monitor", problem=problem, allowed="1: the fleet replaces lost workers itself")
        self._monitor = monitor

    def get_logger_metrics(self) -> dict[str, Any]:
        """Return the number of live workers, and the lowest and highest weight version."""
        versions = [worker.weight_version for worker in self._workers()]
        return {
            "rollbus/workers": len(versions),
            "rollbus/lowest_weight_version": min(versions),
            "rollbus/highest_weight_version": max(versions),
        }

    def clear_logger_metrics(self) -> None:
        """Do nothing: the metrics are of the moment."""

    # Inside.

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._monitor is not None and not isinstance(error, InvalidRequest):
                self._monitor.report_failure(0, error)
            raise
        if self._monitor is not None:
            self._monitor.report_success(0)

    def _connected(self) -> sync.BlockingClient:
        with self._lock:
            if self._client is None:
                self._client = self._exits.enter_context(sync.connect(self._url, **self._options))
            return self._client

    def _workers(self) -> list[WorkerPresence]:
        """Return the live workers of the model. Wait for the first one."""
        fleet = self._connected().fleet
        fleet.wait_for_workers(1, model=self._model, timeout_s=WORKERS_WAIT_S)
        workers = [worker for worker in fleet.workers if self._model in (None, worker.model)]
        models = sorted({worker.model for worker in workers})
        if not models:
            raise NoWorkers(message="the last worker was lost meanwhile")
        if len(models) > 1:
            raise InvalidRequest(field="model", problem="is not set", allowed=f"one of {', '.join(models)}")
        return workers

    def _capabilities(self) -> Capabilities:
        found = [worker.capabilities for worker in self._workers() if worker.capabilities is not None]
        if not found:
            raise NoWorkers(message="no worker has reported its capabilities")
        return min(found, key=lambda capabilities: capabilities.max_model_len)

    def _needed_checkpoint(self) -> Path:
        if self._checkpoint is None:
            allowed = "the folder of the checkpoint with which training began"
            raise InvalidRequest(field="checkpoint", problem="is not set", allowed=allowed)
        return Path(self._checkpoint)

    def _needed_publisher(self) -> PolicyPublisher:
        if self._publisher is None:
            model, checkpoint = self._workers()[0].model, self._needed_checkpoint()
            self._publisher = PolicyPublisher(self._url, model=model, checkpoint=checkpoint, **self._options)
        return self._publisher


class RollbusWeights:
    """NeMo-RL's `WeightSynchronizer`: `generation.weight_synchronizer = RollbusWeights(generation, weights)`.

    Args:
        generation: refits its fleet.
        weights: returns the policy's present weights, as `RollbusGeneration.refit` takes them.

    Attributes:
        version: version of the last refit. None before the first one.
    """

    def __init__(self, generation: RollbusGeneration, weights: Callable[[], Weights]) -> None:
        self._generation = generation
        self._weights = weights
        self.version: int | None = None

    def __repr__(self) -> str:
        """Return one line with the version."""
        return f"<RollbusWeights version={self.version}>"

    @property
    def is_stale(self) -> bool:
        """True until the first refit."""
        return self.version is None

    def init_communicator(self) -> None:
        """Wait for a worker."""
        self._generation.prepare_for_generation()

    def sync_weights(
        self, *, timer: Any = None, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, float] | None:
        """Give the fleet the policy's weights, and return the version as a metric.

        Raises:
            InvalidRequest: there are KV scales, which the fleet takes from the checkpoint only.
            Exception: see `RollbusGeneration.refit`. The version does not change then.
        """
        if kv_scales:
            raise InvalidRequest(field="kv_scales", problem="are set", allowed="none")
        self.version = self._generation.refit(self._weights())
        return {"rollbus/weight_version": float(self.version)}

    def shutdown(self) -> None:
        """Do nothing: `RollbusGeneration.shutdown` releases the lease."""
