"""Replaces the weights of a model in one vLLM worker process, and verifies that they are the requested weights.

vLLM's own reload has three faults (measured with 0.30; v1/worker/gpu_model_runner.py: reload_weights):

- On a CPU, it leaves experts in an order that their kernel misreads.
- If the checkpoint lacks tensors, it only logs them.
- If it fails in the middle, the next reload mixes in the remaining tensors.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from ....bus.protocol.weights.tensors import INDEX
from ....schemas.checks import list_names
from ....schemas.errors import ControlCode, ForeignError, foreign_code

logger = logging.getLogger(__name__)

INIT_TRANSFER = "init_weight_transfer_engine"
START_TRANSFER = "start_weight_update"
UPDATE_TRANSFER = "update_weights"
FINISH_TRANSFER = "finish_weight_update"
"""Methods of vLLM's worker class."""
UNLOADED = "Following weights were not loaded"
"""Begin of vLLM's log message with the parameters of which it does not know whether they were loaded."""
LOGS_UNLOADED = ("vllm.v1.worker.gpu_model_runner", "vllm.model_executor.model_loader.reload.inplace")
"""The modules that log this message, depending on the release."""
MAX_NAMED = 3
"""Maximum number of tensors in an error message."""


def done(**facts: Any) -> dict[str, Any]:
    """Return the answer of a successful call, with `facts` as additional fields."""
    return {"code": None, "error": None, **facts}


def failed(code: ControlCode, error: object) -> dict[str, Any]:
    """Return the answer of a failed call; `error` states the reason."""
    return {"code": str(code), "error": str(error)}


class _NotLoaded(Exception):
    """A parameter differs from the files."""


class Reload:
    """Replaces the weights of one vLLM worker process, any number of times.

    Args:
        worker: vLLM's worker object, with a loaded model.
    """

    def __init__(self, worker: Any) -> None:
        # The worker's own process imports this module too, and needs no torch.
        from .reload_checks import Probing
        from .reload_repairs import DirectCopies

        self._worker = worker
        self._runner = worker.model_runner
        self._direct_copies = DirectCopies
        self._experts: list[_CpuExperts] = []
        self._probing = Probing(self._model(), is_quantized=self._runner.model_config.quantization is not None)
        self._copied: frozenset[str] | None = None
        """Parameters that equal tensors of the checkpoint. They are those that did so after the start of the engine."""

    def load(self, path: str) -> dict[str, Any]:
        """Load the checkpoint in the folder `path`.

        Returns:
            An answer with the fields of `Verified`; `compared` is the number of parameters that were compared with the
            files. On failure, the code is `unsupported` or `engine_error` if the weights are unchanged, else
            `half_written`.
        """
        if not hasattr(self._worker, "reload_weights"):
            return failed(ControlCode.UNSUPPORTED, "this release of vLLM cannot reload weights")
        unreadable = _find_unreadable(Path(path))
        if unreadable is not None:
            return failed(ControlCode.ENGINE_ERROR, unreadable)
        config = self._runner.model_config
        before = config.model, config.revision, config.model_weights
        try:
            with foreign_code():
                self.begin()
                with _without_list_of_unloaded(), self._direct_copies(self._model()):
                    self._worker.reload_weights(weights_path=path)
                self.end()
                began = time.monotonic()
                self._check_equal(Path(path))
                verified = self._probing.verify(is_complete=True)
                seconds = round(time.monotonic() - began, 3)
        except ForeignError as exc:
            # Every error during the load means the same: some weights are new and some are old.
            logger.exception("weights.load_failed path=%s", path)
            # vLLM changes these fields before it loads tensors.
            config.model, config.revision, config.model_weights = before
            self.give_up()
            return failed(ControlCode.HALF_WRITTEN, exc)
        return done(**asdict(replace(verified, compared=len(self._copied or ()), seconds=seconds)))

    def transfer(self, step: str, info: dict[str, Any] | None) -> dict[str, Any]:
        """Call the method `step` of vLLM's weight transfer, with `info` unless it is None.

        Returns:
            An answer. If a step after the initialization fails, its code is `half_written`, and the update has ended.
        """
        if not hasattr(self._worker, step):
            return failed(ControlCode.UNSUPPORTED, f"this release of vLLM has no {step}")
        if step in (UPDATE_TRANSFER, FINISH_TRANSFER) and not self._worker._weight_update_active:
            return failed(ControlCode.ENGINE_ERROR, "no weight update was started; start it first")
        try:
            with foreign_code():
                if step == START_TRANSFER:
                    self.begin()
                with self._direct_copies(self._model()):
                    getattr(self._worker, step)(*(() if info is None else (info,)))
                if step != FINISH_TRANSFER:
                    return done()
                self.end()
                verified = self._probing.verify(is_complete=False)
        except ForeignError as exc:
            logger.exception("weights.transfer_failed step=%s", step)
            if step == INIT_TRANSFER:
                return failed(ControlCode.ENGINE_ERROR, exc)
            self.give_up()
            return failed(ControlCode.HALF_WRITTEN, exc)
        return done(**asdict(verified))

    def begin(self) -> None:
        """Prepare a load: discard what an earlier reload left, and watch experts and modules."""
        if self._copied is None:
            folder = Path(self._runner.model_config.model)
            # The folder may be removed or have other weights now.
            self._copied = frozenset()
            if _find_unreadable(folder) is None:
                self._copied = frozenset(compare_parameters(self._model(), folder)[0])
            if not self._copied:
                logger.warning("weights.comparison_skipped model=%s", folder)
        self.give_up()
        self._experts = [_CpuExperts(layer) for layer in self._model().modules() if _CpuExperts.fits(layer)]
        self._probing.watch()

    def end(self) -> None:
        """Finish a load of all weights: process the modules that vLLM has skipped."""
        self._unwatch()
        self._probing.process_sharing()

    def give_up(self) -> None:
        """Abandon an unfinished reload. Each layer then has real weights, old or new, and can be loaded again."""
        self._unwatch()
        transfer = getattr(self._worker, "weight_transfer_engine", None)
        if transfer is not None and getattr(self._worker, "_weight_update_active", False):
            self._worker._weight_update_active = False
            transfer.reset_weight_update_target()
        _drop_leftovers(self._model())

    def _unwatch(self) -> None:
        self._probing.unwatch()
        for layer in self._experts:
            layer.unwatch()
        self._experts = []

    def _model(self) -> Any:
        return self._runner.get_model()

    def _check_equal(self, folder: Path) -> None:
        equal, has_nan = compare_parameters(self._model(), folder)
        wrong = (self._copied or frozenset()) - equal
        if nan := sorted(wrong & has_nan):
            # NaN differs from itself, so a comparison of values cannot tell whether the parameter was loaded.
            raise _NotLoaded(f"the checkpoint has NaN in {list_names(nan, limit=MAX_NAMED)}")
        if wrong:
            raise _NotLoaded(f"vLLM reported success, but did not load {list_names(sorted(wrong), limit=MAX_NAMED)}")


def compare_parameters(model: Any, folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of the parameters that equal the tensors of the same name in `folder`.

    Also return the names of the other parameters whose tensors there have NaN.
    """
    import torch
    from safetensors import safe_open

    parameters = {
        # The name of a layer's weight has this part while an adapter wraps the layer.
        name.replace(".base_layer.", "."): parameter.data
        for name, parameter in model.named_parameters()
    }
    equal: set[str] = set()
    has_nan: set[str] = set()
    for file in _files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in parameters.keys() & set(tensors.keys()):
                parameter = parameters[name]
                if list(parameter.shape) != tensors.get_slice(name).get_shape():
                    continue
                stored = tensors.get_tensor(name).to(parameter.device, parameter.dtype)
                if torch.equal(parameter, stored):
                    equal.add(name)
                elif stored.is_floating_point() and stored.isnan().any():
                    has_nan.add(name)
    return equal, has_nan


class _CpuExperts:
    """The experts of one layer on a CPU, whose kernel needs packed weights.

    vLLM packs them only after it has created the kernel, so only after the first load
    (layers/fused_moe/unquantized_fused_moe_method.py: _setup_kernel). This class packs them after each load, before
    vLLM copies them into the kernel's memory. They must not be packed twice, so this class also detects whether the
    release of vLLM packs them itself.
    """

    def __init__(self, layer: Any) -> None:
        self._method = layer.quant_method
        self._kernel = self._method.moe_kernel.fused_experts
        self._is_packed = False
        self._process = self._method.process_weights_after_loading
        self._pack = self._kernel.process_weights_after_loading
        self._method.process_weights_after_loading = self._process_and_pack
        self._kernel.process_weights_after_loading = self._note_packing

    @staticmethod
    def fits(layer: Any) -> bool:
        """True if `layer` has experts for vLLM's CPU kernel."""
        method = getattr(layer, "quant_method", None)
        backend = getattr(method, "unquantized_backend", None)
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        is_packable = hasattr(layer, "w13_weight") and hasattr(kernel, "process_weights_after_loading")
        return is_packable and getattr(backend, "name", None) == "CPU"

    def unwatch(self) -> None:
        """Restore the methods that the constructor replaced."""
        del self._method.process_weights_after_loading
        del self._kernel.process_weights_after_loading

    def _process_and_pack(self, layer: Any) -> None:
        self._is_packed = False
        self._process(layer)
        if self._method.moe_kernel.fused_experts is self._kernel and not self._is_packed:
            self._pack(layer)

    def _note_packing(self, layer: Any) -> None:
        self._is_packed = True
        self._pack(layer)


def _drop_leftovers(model: Any) -> None:
    """Restore the tensors of each layer that waits for weights (model_loader/reload/layerwise.py).

    vLLM stores the tensors that it has received for this layer. A later reload would load them too.
    """
    try:
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
    except ImportError:
        # This release loads in another way and stores nothing that could be discarded here.
        return
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


@contextlib.contextmanager
def _without_list_of_unloaded() -> Iterator[None]:
    """Suppress vLLM's log message with the parameters of which it does not know whether they were loaded.

    The message lists many parameters without a fault: experts have other names in a checkpoint, and a module's copies
    of its weights are in no checkpoint. The comparisons after the load find parameters without new weights.
    """

    def keep(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(UNLOADED)

    loggers = [logging.getLogger(name) for name in LOGS_UNLOADED]
    for source in loggers:
        source.addFilter(keep)
    try:
        yield
    finally:
        for source in loggers:
            source.removeFilter(keep)


def clear_nan(kv_caches: list[Any]) -> None:
    """Replace NaN and infinities in the KV cache by zeros.

    vLLM does not clear a block before it uses the block again. Old values beyond the tokens of the new request are
    multiplied by zero, and zero times NaN is NaN. Without this function, NaN spreads from one request to many others.
    """
    for cache in kv_caches:
        if isinstance(cache, list):
            # The layer has several tensors.
            clear_nan(cache)
        elif cache.is_floating_point() and cache.element_size() > 1:
            cache.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files in `folder`. If there is an index, return only the files in it, like vLLM."""
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _find_unreadable(folder: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        files = _files(folder)
        for file in files:
            # This reads the header and compares it with the size of the file.
            with safe_open(file, framework="pt"):
                pass
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return None if files else f"folder {folder} has no *.safetensors files"
