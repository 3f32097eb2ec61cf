"""Loads new weights into a vLLM engine, from a checkpoint or through vLLM's own transfer engine."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ControlCode, ControlError
from ....schemas.limits import MAX_MODULE_CHARS, MAX_UNPROBED
from ....schemas.weights import Verified
from .calls import Calls, check_supported
from .loaded import LoadSerials
from .reloading import FINISH_TRANSFER, INIT_TRANSFER, START_TRANSFER, UPDATE_TRANSFER

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["VllmWeightLoader"]

logger = logging.getLogger(__name__)


class VllmWeightLoader:
    """Replaces the weights of an engine. Module `reloading` has the part that runs in vLLM's worker processes.

    Args:
        load_refusal: reason why the engine cannot load checkpoints; None: it can.
        transfer_refusal: reason why the engine cannot receive a weight transfer; None: it can.
    """

    def __init__(
        self,
        llm: "AsyncLLM",
        calls: Calls,
        loaded: LoadSerials,
        *,
        load_refusal: str | None,
        transfer_refusal: str | None,
    ) -> None:
        self._model_config = llm.vllm_config.model_config
        self._calls = calls
        self._loaded = loaded
        self._load_refusal = load_refusal
        self._transfer_refusal = transfer_refusal
        self._is_transferring = False

    async def load(self, path: Path) -> Verified:
        """Load a checkpoint; see `Engine.load_weights`."""
        check_supported(self._load_refusal)
        self._is_transferring = False
        self._loaded.replace_weights()
        answers = await self._calls.on_workers("rollbus_load_weights", path=str(path))
        # The worker processes have the same values.
        self._model_config.model = str(path)
        self._model_config.revision = None
        self._loaded.adapters.clear()
        verified = _summed(answers)
        logger.info("engine.weights_loaded path=%s verified=%s", path, verified)
        return verified

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Pass `info` to vLLM's transfer engine; see `Engine.init_weight_transfer`."""
        check_supported(self._transfer_refusal)
        await self._calls.on_workers("rollbus_transfer", step=INIT_TRANSFER, info=dict(info))

    async def start_transfer(self) -> None:
        """Begin to receive weights; see `Engine.start_weight_update`."""
        check_supported(self._transfer_refusal)
        self._loaded.replace_weights()
        await self._transfer(START_TRANSFER)
        self._is_transferring = True

    async def load_chunk(self, info: Mapping[str, Any]) -> None:
        """Load some weights; see `Engine.update_weight_chunk`."""
        self._check_transferring()
        await self._transfer(UPDATE_TRANSFER, info=dict(info))

    async def finish_transfer(self) -> Verified:
        """Finish the update after the last chunk; see `Engine.finish_weight_update`."""
        self._check_transferring()
        answers = await self._transfer(FINISH_TRANSFER)
        self._is_transferring = False
        self._loaded.adapters.clear()
        return _summed(answers)

    async def abandon_transfer(self) -> None:
        """End an unfinished update; see `Engine.abandon_weight_update`."""
        self._is_transferring = False
        await self._calls.on_workers("rollbus_abandon_transfer")

    async def _transfer(self, step: str, **info: Any) -> list[dict[str, Any]]:
        try:
            return await self._calls.on_workers("rollbus_transfer", step=step, **info)
        except ControlError:
            self._is_transferring = False
            raise

    def _check_transferring(self) -> None:
        check_supported(self._transfer_refusal)
        if not self._is_transferring:
            raise ControlError(ControlCode.ENGINE_ERROR, "no weight update was started; start it first")


def _summed(answers: Sequence[Mapping[str, Any]]) -> Verified:
    """Return the sum of the comparisons in all worker processes."""
    unprobed = sorted({name for answer in answers for name in answer["unprobed"]})
    return Verified(
        probed=sum(answer["probed"] for answer in answers),
        equal=sum(answer["equal"] for answer in answers),
        compared=sum(answer["compared"] for answer in answers),
        unprobed=tuple(name[:MAX_MODULE_CHARS] for name in unprobed[:MAX_UNPROBED]),
        num_unprobed=len(unprobed),
        seconds=max(answer["seconds"] for answer in answers),
    )
