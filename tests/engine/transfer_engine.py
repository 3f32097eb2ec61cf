"""Code for vLLM's worker processes: a weight-transfer engine that reads files, and a user's worker extension.

Only engines whose `worker_extension_cls` names this module import it.
"""

import sys
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tests.support.processes import misnamed


@dataclass
class Origin:
    """The source file of all weights."""

    file: str


@dataclass
class Part:
    """The tensors of one update: those whose index modulo `of` is `remainder`."""

    remainder: int
    of: int


class FromFile(WeightTransferEngine):  # type: ignore[misc]
    """Reads tensors from a safetensors file, in place of a network."""

    init_info_cls = Origin
    update_info_cls = Part

    def init_transfer_engine(self, init_info: Origin) -> None:
        """Store the file name."""
        self.file = init_info.file

    def start_weight_update(self) -> None:
        """Start a layerwise reload, as vLLM's engines for checkpoints do."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Part) -> None:
        """Load the tensors of this part."""
        with safe_open(self.file, framework="pt") as tensors:
            names = [
                name for number, name in enumerate(tensors.keys()) if number % update_info.of == update_info.remainder
            ]
            self.model.load_weights((name, tensors.get_tensor(name)) for name in names)

    def finish_weight_update(self) -> None:
        """Finish the layerwise reload, as vLLM's engines for checkpoints do."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing, because no file is open."""


WeightTransferEngineFactory.register_engine("from-file", FromFile)


class UserExtension:
    """An example of a user's `worker_extension_cls`."""

    def user_says(self) -> str:
        """Return the model path in the configuration of this worker process."""
        worker: Any = self
        return str(worker.model_runner.model_config.model)

    def modules_of_ours(self) -> tuple[list[str], list[str]]:
        """Return the imported modules of rollbus, and those that this process imported under another name."""
        return sorted(name for name in sys.modules if name.startswith("rollbus.")), misnamed()
