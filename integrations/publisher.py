"""Publishes a trainer's weights to a fleet, one version after another, even with a LoRA adapter of PEFT."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from msgspec.structs import replace
from safetensors import safe_open

from .. import sync
from ..bus.protocol.fleet.command_result import RESULTS, CommandIncomplete, CommandResult
from ..bus.protocol.weights.chain import LEASE_S
from ..bus.publish.options import PublishedWeights
from ..bus.publish.publisher import WeightPublisher
from ..schemas.errors import ControlCode, ControlError, InvalidRequest
from ..schemas.presence import WorkerPresence
from ..trainer.checkpoint import checkpoint_tensors

DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Dtypes of checkpoint tensors that a trainer may hold in another dtype."""
MAX_TRIES: Final = 4
"""Maximum number of fleet updates with one version. Workers may die in an update; the next update leaves them out."""
WORKERS_WAIT_S: Final = 600.0
"""Seconds to wait for the first worker, because engines load for minutes."""
LEASE_WAIT_S: Final = 2 * LEASE_S
"""Seconds to wait for the lease: longer than the remaining lease of a trainer that was killed and restarted."""
LEASE_LOOK_S: Final = 1.0
"""Seconds between two requests for the lease."""


class PolicyPublisher:
    """Publishes a model's weights in the dtypes of its checkpoint. Use it in one process of a trainer.

    Its first version follows the present version of the fleet.

    Args:
        url: URL of the NATS server. None: as in `rollbus.connect`.
        model: served name of the model.
        checkpoint: folder of the checkpoint with which training began and which the workers serve.
        options: `fleet` and `credentials`, as in `rollbus.connect`.

    Attributes:
        version: version of the fleet. None before the first publication.
        last: result of the last publication.
    """

    def __init__(
        self, url: str | None = None, *, model: str, checkpoint: str | os.PathLike[str], **options: Any
    ) -> None:
        self._url = url
        self._model = model
        self._checkpoint = Path(checkpoint)
        self._options = options
        self._exits = ExitStack()
        self._opened: tuple[sync.BlockingClient, WeightPublisher] | None = None
        self._dtypes: Mapping[str, torch.dtype] = {}
        self._next = 1
        self.version: int | None = None
        self.last: PublishedWeights | None = None

    def __repr__(self) -> str:
        """Return one line with the version."""
        return f"<{type(self).__name__} {self._model} version={self.version}>"

    def open(self) -> None:
        """Wait for a worker, and acquire the lease. This has no effect if the publisher is open.

        Raises:
            NoWorkers: no worker served the model within ten minutes.
            ControlError: another publisher holds the lease and renews it.
            InvalidRequest: the folder has no checkpoint.
        """
        self._connected()

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> PublishedWeights:
        """Publish a version, and wait until each live worker has loaded it. Workers that die meanwhile are left out.

        Args:
            tensors: all tensors of the model as (name, tensor), named as in the checkpoint. The iterable is consumed to
                its end.

        Raises:
            InvalidRequest: a tensor differs in kind from the checkpoint.
            ControlError: the lease is lost, or the store has no room.
            CommandIncomplete: a live worker has not loaded the version.
            NoWorkers: no worker is left.
        """
        stored = self.store(tensors)
        client, _ = self._connected()
        ledger = update_fleet(client, objects=stored.objects, version=stored.version, model=self._model)
        self.last = replace(stored, ledger=ledger)
        self.version = stored.version
        return self.last

    def store(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> PublishedWeights:
        """Publish a version, and return at its commit. The fleet loads it at `update_weights` with its `objects`.

        Args:
            tensors: as in `publish`.

        Raises:
            InvalidRequest: a tensor differs in kind from the checkpoint. Nothing is published.
            ControlError: the lease is lost, or the store has no room.
        """
        _, publisher = self._connected()
        stored = publisher.publish_blocking(self._cast(tensors), version=self._next, update=False)
        self._next += 1
        return stored

    def publish_model(self, model: Any) -> PublishedWeights:
        """Publish a transformers model, whole in this process, under the names of its checkpoint, as `publish` does.

        With a LoRA adapter of PEFT, the fleet gets the sum of base weights and adapter. During the publication, the
        adapted weights are in memory twice.

        Raises:
            InvalidRequest: the model has PEFT adapters that cannot be added to its weights.
            CheckpointMismatch: the model is sharded, or is another model than that of the checkpoint.
        """
        if not hasattr(model, "peft_config"):
            return self.publish(checkpoint_tensors(model, self._checkpoint))
        # imported here because PEFT is optional

        tensors = checkpoint_tensors(model.get_base_model(), self._checkpoint, state=merged_state(model))
        return self.publish(tensors)

    def close(self) -> None:
        """Release the lease. This has no effect if the publisher is not open."""
        self._opened = None
        self._exits.close()

    def _connected(self) -> tuple[sync.BlockingClient, WeightPublisher]:
        if self._opened is None:
            with ExitStack() as stack:
                client = stack.enter_context(sync.connect(self._url, **self._options))
                client.fleet.wait_for_workers(1, model=self._model, timeout_s=WORKERS_WAIT_S)
                self._dtypes = dict(_dtypes(self._checkpoint))
                publisher = self._with_lease(client)
                stack.push(publisher)
                present = [worker.weight_version for worker in client.fleet.workers if worker.model == self._model]
                # The previous trainer may have stored a version and ended before the workers loaded it.
                self._next = 1 + max(publisher.last_version or 0, *present, 0)
                self._opened = client, publisher
                self._exits = stack.pop_all()
        return self._opened

    def _with_lease(self, client: sync.BlockingClient) -> WeightPublisher:
        """Return the open publisher. Wait until the lease of a killed trainer has expired."""
        publisher = WeightPublisher(client.with_asyncio, model=self._model, checkpoint=self._checkpoint)
        until = time.monotonic() + LEASE_WAIT_S
        while True:
            try:
                return publisher.__enter__()
            except ControlError as error:
                if error.code is not ControlCode.PUBLISHER_BUSY or time.monotonic() > until:
                    raise
                time.sleep(LEASE_LOOK_S)

    def _cast(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.detach().to(self._dtypes.get(name, tensor.dtype))


def update_fleet(client: sync.BlockingClient, **update: Any) -> CommandResult:
    """Make the fleet load a version, and repeat the update if workers die during it.

    Args:
        client: client of the fleet.
        update: arguments of `Fleet.update_weights`.

    Raises:
        CommandIncomplete: a live worker has not loaded the version.
        NoWorkers: no worker is left.
    """
    tries_left = MAX_TRIES
    while True:
        tries_left -= 1
        before = client.fleet.workers
        try:
            return client.fleet.update_weights(**update)
        except CommandIncomplete as error:
            if not tries_left or behind(error.ledger, before, client.fleet.workers):
                raise
            # If a worker died in the check before the update, nothing was started.
            if error.check_of is None and error.ledger.applied:
                return error.ledger


def behind(ledger: CommandResult, before: Iterable[WorkerPresence], now: Iterable[WorkerPresence]) -> set[str]:
    """Return the live workers that were asked to load a version and have not loaded it.

    A worker that died and restarted under its name was not asked: it loads the version before it serves.

    Args:
        ledger: result of the update.
        before: live workers at the start of the update.
        now: workers that are live now.
    """
    asked = {(worker.worker, worker.incarnation) for worker in before}
    stayed = {worker.worker for worker in now if (worker.worker, worker.incarnation) in asked}
    refused = {name for column in RESULTS[1:] if column != "missing" for name in getattr(ledger, column)}
    return {worker.worker for worker in now} & refused | stayed & ledger.missing.keys()


def merged_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the model inside a `PeftModel`, under its own names. Adapted weights are new tensors.

    PEFT's `merge_adapter` and `unmerge_adapter` would round the trainer's frozen weights with each version. This
    function does not change them.

    Raises:
        InvalidRequest: there is not exactly one active adapter, or it is not plain LoRA of linear layers.
    """
    # The client's dependencies do not include PEFT. A model with an adapter comes from it.
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapters, whole = model.active_adapters, model.get_base_model()
    if len(adapters) != 1:
        raise InvalidRequest(field="model", problem=f"has {len(adapters)} active PEFT adapters", allowed="one")
    [adapter] = adapters
    layers: dict[str, Any] = {}
    for name, module in whole.named_modules():
        if isinstance(module, BaseTunerLayer):
            _check_plain(name, module, adapter)
            layers[f"{name}.base_layer.weight"] = module
    state: dict[str, torch.Tensor] = {}
    for name, tensor in whole.state_dict().items():
        if ".lora_" in name or ".original_module." in name:
            continue
        own = name.replace(".base_layer.", ".").replace(f".modules_to_save.{adapter}.", ".")
        has_delta = name in layers and adapter in layers[name].lora_A
        state[own] = tensor + layers[name].get_delta_weight(adapter).detach() if has_delta else tensor
    return state


def _check_plain(name: str, layer: Any, adapter: str) -> None:
    """Reject an adapter that is more than a product of two matrices added to a weight."""
    from peft.tuners.lora import Linear

    if type(layer) is not Linear or adapter in layer.lora_variant or layer.lora_bias.get(adapter):
        problem = f"has a PEFT adapter of another kind at {name}"
        raise InvalidRequest(field="model", problem=problem, allowed="LoRA of linear layers, without DoRA and biases")


def _dtypes(checkpoint: Path) -> Iterator[tuple[str, torch.dtype]]:
    """Yield (name, dtype) of the tensors of a checkpoint that may be cast."""
    for name, tensor in tensor_slices(checkpoint):
        if tensor.get_dtype() in DTYPES:
            yield name, DTYPES[tensor.get_dtype()]


def tensor_slices(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, slice of safetensors, with its shape and dtype) of the tensors of a checkpoint."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_slice(name)
