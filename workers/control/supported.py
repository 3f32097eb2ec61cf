"""Checks that an engine supports a source, before the source is fetched."""

from ...schemas.errors import ControlCode, ControlError
from ...schemas.presence import Capabilities
from ...schemas.weights import WeightSource

__all__ = ["check_adapters_supported", "check_weights_supported"]


def check_weights_supported(source: WeightSource, capabilities: Capabilities) -> None:
    """Check that the engine can replace its weights by those of `source`.

    Raises:
        ControlError: `unsupported`.
    """
    if not capabilities.weight_updates:
        raise ControlError(ControlCode.UNSUPPORTED, "this engine cannot replace its weights")
    _check_fetchable(source, capabilities)


def check_adapters_supported(source: WeightSource, capabilities: Capabilities) -> None:
    """Check that the engine can load the LoRA adapter of `source`.

    Raises:
        ControlError: `unsupported`.
    """
    if not capabilities.max_loras:
        raise ControlError(
            ControlCode.UNSUPPORTED,
            "this engine loads no LoRA adapters; its arguments may enable adapters (for vLLM: 'enable_lora')",
        )
    _check_fetchable(source, capabilities)


def _check_fetchable(source: WeightSource, capabilities: Capabilities) -> None:
    if source.objects is not None and not capabilities.weight_deltas:
        raise ControlError(
            ControlCode.UNSUPPORTED,
            f"{source} is refused: processes of this engine may run on several machines, but fetched files are only on "
            "the worker's machine; allowed: the path of a folder that all these machines share",
        )
