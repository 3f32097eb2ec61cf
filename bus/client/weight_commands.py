"""The commands that change the weights and adapters of a fleet."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from ...schemas import control
from ...schemas.control import AnyCommand, PauseMode
from ..control.ack_collector import OnAck
from ..protocol.fleet.command_result import CommandResult
from .fleet_options import Path, SendOptions, SourceOptions, UpdateOptions, pop_source, source_of, split_options
from .loop_thread import LoopThread
from .runtime import ClientRuntime

__all__ = ["WeightCommands"]


class WeightCommands:
    """The part of `Fleet` that changes weights and adapters."""

    def __init__(self, thread: LoopThread[Any], runtime: ClientRuntime) -> None:
        self._thread = thread
        self._runtime = runtime

    async def check_weights(
        self, path: Path | None = None, *, objects: str | None = None, **options: Unpack[SendOptions]
    ) -> CommandResult:
        """Check if the workers can execute `update_weights` with this source. This changes nothing."""
        return await self._send(control.CheckWeights, options, source=source_of(path, objects))

    async def update_weights(
        self, path: Path | None = None, *, version: int, **options: Unpack[UpdateOptions]
    ) -> CommandResult:
        """Replace the weights of all workers of a model together.

        All workers stage the weights before any worker switches to them. Each worker verifies the weights after the
        switch. A worker that fails serves no requests until a later successful update or a restart. If all workers
        fail, the desired state returns to its previous value.

        Args:
            path: folder with a whole checkpoint. On the workers' machines it must be below one of their weight roots.
            version: version of the new weights, higher than the present one. Every token sampled from them has this
                version.

        To verify that the workers compute the same as the trainer, pass `expected_canary`:

            [worker, *_] = (await rb.fleet.state()).workers
            request = rollbus.canary_request(worker.capabilities)
            ids, logprobs = greedy(request.prompt_token_ids, request.sampling.max_tokens)  # the trainer's own model
            canary = rollbus.Canary(token_ids=tuple(ids), logprobs=tuple(logprobs))
            await rb.fleet.update_weights(path, version=7, expected_canary=canary)

        Raises:
            ControlError: also raised if the folder could not be uploaded. Nothing was changed.
        """
        fields, on_ack = split_options(options)
        source, upload = pop_source(path, fields)
        min_staged = fields.pop("min_staged", None)
        command = control.UpdateWeights(version=version, source=source, **fields)
        update = self._runtime.updates.update_weights(command, upload=upload, on_ack=on_ack, min_staged=min_staged)
        return await self._thread.run(update)

    async def load_lora(
        self,
        name: str,
        path: Path | None = None,
        *,
        version: int | None = None,
        for_base: bool = False,
        **options: Unpack[SourceOptions],
    ) -> CommandResult:
        """Load a LoRA adapter into all workers of a model, or replace the adapter of the same name.

        Args:
            name: name of the adapter in requests.
            path: folder of the adapter. On the workers' machines it must be below one of their weight roots.
            version: version of the adapter. Every token sampled with the adapter has this version. None: one more than
                the recorded version.
            for_base: `name` is the model's own name: requests for the model use the adapter until it is unloaded or the
                weights are replaced. `version` continues the versions of the weights, and `min_weight_version`,
                `max_weight_lag` and `drop_stale` compare with it.

        Raises:
            ControlError: also raised if the folder could not be uploaded. Nothing was changed.
        """
        fields, on_ack = split_options(options)
        source, upload = pop_source(path, fields)
        command = control.LoadLora(name=name, source=source, version=version or 0, for_base=for_base, **fields)
        loading = self._runtime.updates.load_lora(
            command, is_next_version=version is None, upload=upload, on_ack=on_ack
        )
        return await self._thread.run(loading)

    async def unload_lora(self, name: str, **options: Unpack[SendOptions]) -> CommandResult:
        """Unload a LoRA adapter. Requests in flight that use it end. The client deletes its uploaded files.

        Raises:
            ControlError: `not_found`: no worker has the adapter or should have it. Nothing was recorded.
        """
        fields, on_ack = split_options(options)
        command = control.UnloadLora(name=name, **fields)
        return await self._thread.run(self._runtime.updates.unload_lora(command, on_ack))

    async def init_weight_transfer(self, info: dict[str, Any], **options: Unpack[SendOptions]) -> CommandResult:
        """Pass `info` to `init_weight_transfer_engine` of the engines."""
        return await self._send(control.InitWeightTransfer, options, info=info)

    async def start_weight_update(self, *, mode: PauseMode = "keep", **options: Unpack[SendOptions]) -> CommandResult:
        """Pause the requests in flight and start an update through the engines' weight transfer engine.

        The transfer belongs to this client. If the client is lost for 20 s, or sends no command for 600 s (an option of
        the worker), the workers end the transfer and load the desired weights again.

        Args:
            mode: handling of the requests in flight, as in `pause`.

        Returns:
            The command result; its `id` is the id of the transfer.
        """
        fields, on_ack = split_options(options)
        command = control.StartWeightUpdate(mode=mode, **fields)
        return await self._thread.run(self._runtime.updates.start_weight_update(command, on_ack))

    async def update_weight_chunk(
        self, info: dict[str, Any], *, transfer: str | None = None, **options: Unpack[SendOptions]
    ) -> CommandResult:
        """Pass `info` to `update_weights` of the engines.

        Args:
            transfer: id of the transfer that must be open. None (default): any of this client.
        """
        return await self._send(control.UpdateWeightChunk, options, info=info, transfer=transfer)

    async def cancel_weight_update(
        self, *, transfer: str | None = None, **options: Unpack[SendOptions]
    ) -> CommandResult:
        """End an open transfer of any owner. The workers load the desired weights again.

        Args:
            transfer: id of the transfer. None (default): whichever is open.

        Raises:
            CommandIncomplete: also if no worker has it open (`transfer_expired`). One worker that has it suffices.
        """
        return await self._send(control.CancelWeightUpdate, options, transfer=transfer)

    async def finish_weight_update(
        self,
        version: int,
        *,
        allow_rollback: bool = False,
        label: str | None = None,
        transfer: str | None = None,
        **options: Unpack[SendOptions],
    ) -> CommandResult:
        """Finish an update through the transfer engine. Workers verify the weights as after `update_weights`.

        A worker that starts later cannot get these weights. It serves no requests until the next update. If the version
        is rejected, the transfer stays open; finish it with another version.

        Args:
            version: version of the new weights, higher than the present one.
            allow_rollback: True: allow an older version, or the version of a checkpoint again. Default: False.
            label: the trainer's name for the version, for example `step-42`.
            transfer: id of the transfer that must be open. None (default): any of this client.

        Raises:
            ControlError: also raised if no worker can finish: `transfer_expired`, `transfer_held`, `transfer_empty`.
        """
        fields, on_ack = split_options(options)
        fields.update(version=version, allow_rollback=allow_rollback, label=label, transfer=transfer)
        command = control.FinishWeightUpdate(**fields)
        return await self._thread.run(self._runtime.updates.finish_weight_update(command, on_ack))

    async def send(self, command: AnyCommand, *, on_ack: OnAck | None = None) -> CommandResult:
        """Send any command of `schemas/control.py`, without upload, earlier checks or later comparison."""
        return await self._thread.run(self._runtime.controller.send(command, on_ack))

    async def _send(self, kind: Callable[..., AnyCommand], options: Mapping[str, Any], **fields: Any) -> CommandResult:
        common, on_ack = split_options(options)
        return await self.send(kind(**fields, **common), on_ack=on_ack)
