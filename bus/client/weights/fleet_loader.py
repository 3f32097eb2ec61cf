"""Makes the fleet load a committed version, and deletes old versions from the store."""

import logging

from msgspec import structs

from ....schemas.errors import ControlCode, ControlError, NoWorkers, RollbusError
from ....schemas.weights import WeightSource
from ...control.updates import Updates
from ...control.uploads import sources_in
from ...control.versions import VersionStore
from ...protocol.fleet.command_result import CommandResult
from ...protocol.weights.chain import PRESSED_S, YOUNG_S
from .options import AdapterOptions, PublishOptions

__all__ = ["FleetLoader"]

logger = logging.getLogger(__name__)


class FleetLoader:
    """Updates the workers of one model. Runs on the bus thread."""

    def __init__(self, updates: Updates, versions: VersionStore, model: str) -> None:
        self._updates = updates
        self._versions = versions
        self._model = model

    def __repr__(self) -> str:
        """Return one line with the model."""
        return f"<FleetLoader {self._model}>"

    async def check_adapter(self, options: AdapterOptions) -> None:
        """Raise the errors that `load` would raise before it sends a command. Nothing is stored at this point.

        Raises:
            ControlError: `not_allowed` if this user may not load adapters, or the desired state rejects the version.
        """
        try:
            await self._updates.check_version(options.command)
        except ControlError as error:
            if error.code is not ControlCode.NOT_ALLOWED:
                raise
            hint = "update=False stores the adapter; an admin can then load it with load_lora"
            raise ControlError(error.code, f"{error.message}. {hint}") from error

    async def load(self, objects: str, options: AdapterOptions) -> CommandResult:
        """Make the fleet load a committed adapter.

        Raises:
            NoWorkers: the adapter is stored, and no worker can load it.
        """
        command = structs.replace(options.command, source=WeightSource(objects=objects))
        try:
            return await self._updates.load_lora(command, is_next_version=False, upload=False, on_ack=options.on_ack)
        except NoWorkers as error:
            raise NoWorkers(
                message=f"adapter {command.name!r} is stored as objects:{objects}, and no worker has loaded "
                f"it: {error}. When workers are running, call fleet.load_lora({command.name!r}, "
                f"objects={objects!r}, version={command.version})"
            ) from error
        finally:
            await self.clean()

    async def update(self, objects: str, options: PublishOptions) -> CommandResult:
        """Make the fleet load a committed version, and delete old versions.

        Raises:
            NoWorkers: the version is stored, and no worker can load it.
        """
        command = structs.replace(options.command, source=WeightSource(objects=objects))
        try:
            ledger = await self._updates.update_weights(
                command, upload=False, on_ack=options.on_ack, min_staged=options.min_staged
            )
        except NoWorkers as error:
            raise NoWorkers(
                message=f"version {command.version} is stored as objects:{objects}, and no worker has loaded it: "
                f"{error}. When workers are running, call "
                f"fleet.update_weights(objects={objects!r}, version={command.version})"
            ) from error
        finally:
            await self.clean()
        return ledger

    async def make_room(self) -> None:
        """Delete old folders from a full bucket. Keep folders without a recorded version for only one minute."""
        await self.clean(young_s=PRESSED_S)

    async def clean(self, *, young_s: float = YOUNG_S) -> None:
        """Delete old versions that the desired state does not name.

        A failure is logged. The next call deletes the remaining folders.
        """
        try:
            recorded = sources_in(await self._updates.state(self._model))
        except RollbusError as error:
            logger.warning("weights.cleanup_failed model=%s error=%s", self._model, error)
            return
        await self._versions.clean(recorded, young_s=young_s)
