"""For vLLM's worker processes: a weight-transfer engine that reads from files, and what a user may add to a worker.

Only engines whose `worker_extension_cls` says so import this.
"""

import sys
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tests.support.one_name import misnamed

__all__ = ["FromFile", "UserExtension"]


@dataclass
class Origin:
    """Where all weights come from."""

    file: str


@dataclass
class Part:
    """Which of the file's tensors to take: every one whose number is `remainder`, modulo `of`."""

    remainder: int
    of: int


class FromFile(WeightTransferEngine):  # type: ignore[misc]
    """Takes tensors out of a safetensors file, as others take them from a network."""

    init_info_cls = Origin
    update_info_cls = Part

    def init_transfer_engine(self, init_info: Origin) -> None:
        """Remember the file."""
        self.file = init_info.file

    def start_weight_update(self) -> None:
        """As the engines of vLLM that take checkpoints do."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Part) -> None:
        """Load some tensors."""
        with safe_open(self.file, framework="pt") as tensors:
            names = [
                name for number, name in enumerate(tensors.keys()) if number % update_info.of == update_info.remainder
            ]
            self.model.load_weights((name, tensors.get_tensor(name)) for name in names)

    def finish_weight_update(self) -> None:
        """As the engines of vLLM that take checkpoints do."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is open."""


WeightTransferEngineFactory.register_engine("from-file", FromFile)


class UserExtension:
    """What a user's `worker_extension_cls` may be."""

    def user_says(self) -> str:
        """Return where this worker process thinks its weights come from."""
        worker: Any = self
        return str(worker.model_runner.model_config.model)

    def modules_of_ours(self) -> tuple[list[str], list[str]]:
        """Return the modules of rollbus that this process has imported, and those it has under another name."""
        return sorted(name for name in sys.modules if name.startswith("rollbus.")), misnamed()
