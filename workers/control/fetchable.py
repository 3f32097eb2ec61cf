"""Whether an engine can load files that only the worker's own machine has."""

from ...schemas.control import WeightSource
from ...schemas.errors import ControlCode, ControlError
from ...schemas.presence import Capabilities

__all__ = ["check_fetchable"]


def check_fetchable(source: WeightSource, capabilities: Capabilities) -> None:
    """Check that the engine can load `source` after the worker has fetched it.

    Raises:
        ControlError: `unsupported`: the source is in the object store, and processes of the engine may run on machines
            that would not have the files.
    """
    if source.objects is not None and not capabilities.weight_deltas:
        raise ControlError(
            ControlCode.UNSUPPORTED,
            f"{source} is refused: processes of this engine may run on several machines, and fetched files are on the "
            "worker's machine only; allowed: the path of a folder that all of these machines share",
        )
