"""The plugin that lets vLLM return routed experts although it has a KV connector: a `vllm.general_plugins` entry point.

vLLM refuses the two together (config/vllm.py), as it cannot merge what two engines know: 0.30 for each connector, later
releases for those that take KV from other engines. Here they are merged: the prompt's rows come from where its KV was
computed, and the others' copies are dropped. vLLM checks its configuration again in the engine core's process, so the
plugin has to be in every process.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from .extension import is_ours
from .kv.config import routing_refusal
from .kv.params import TAKES_KV

__all__ = ["install", "keep_external_hits"]

CHECK = "_verify_aux_output_compatibility"
"""Since 0.31 the method of `VllmConfig` that refuses; in 0.30 it is `__post_init__`."""
REFUSALS = {
    CHECK: "; PD auxiliary output is not supported",
    "__post_init__": "--enable-return-routed-experts is incompatible with KV connectors",
}
"""What vLLM says, by the method that says it."""
FLAG = "self.model_config.enable_return_routed_experts"
"""What 0.30 reads, once: the checks under it are those of pipeline and context parallelism, and then this one."""
MARK = "_rollbus_lifts_refusal"


def install() -> None:
    """Lift the refusal for rollbus's own engines; called by vLLM in each of its processes, harmless when repeated."""
    from vllm.config import VllmConfig

    name, run = (CHECK, _check_aux_output) if hasattr(VllmConfig, CHECK) else ("__post_init__", _check_all)
    check = getattr(VllmConfig, name)
    if hasattr(check, MARK):
        return

    @functools.wraps(check)
    def checked(config: Any) -> None:
        try:
            check(config)
        except ValueError as exc:
            if REFUSALS[name] not in str(exc) or not _may_lift(config):
                raise
        else:
            return
        run(config, check)

    setattr(checked, MARK, True)
    setattr(VllmConfig, name, checked)


def keep_external_hits() -> None:
    """Let decode phases use the KV that they are handed, in an engine core of a rollbus worker; harmless when repeated.

    From 0.33 on, with routed experts, vLLM takes KV from elsewhere only where it holds the rows of all its tokens, and
    computes the prompt again where it does not. A decode phase asks for no row before its prompt's last token, which is
    computed here.
    """
    try:
        # By name, as the type checker reads the installed release only.
        scheduling = importlib.import_module("vllm.distributed.aux_output_connector.connector")
    except ModuleNotFoundError:
        # 0.30 keeps the rows in another way.
        return
    cap: Any = getattr(scheduling.AuxOutputSchedulerConnector, "cap_external_hit", None)
    if cap is None or hasattr(cap, MARK):
        return

    @functools.wraps(cap)
    def capped(connector: Any, request: Any, num_local: int, num_external: int) -> int:
        num_kept: int = cap(connector, request, num_local, num_external)
        # What is computed first must begin a block of rows (worker.py: _publish_blocks).
        is_aligned = (num_local + num_external) % connector._block_size == 0
        return num_external if is_aligned and _needs_no_older_rows(request) else num_kept

    setattr(capped, MARK, True)
    scheduling.AuxOutputSchedulerConnector.cap_external_hit = capped


def _needs_no_older_rows(request: Any) -> bool:
    start = request.sampling_params.routed_experts_prompt_start
    is_decode_phase = bool((request.kv_transfer_params or {}).get(TAKES_KV))
    return is_decode_phase and start >= request.num_prompt_tokens - 1


def _check_all(config: Any, check: Callable[[Any], None]) -> None:
    """Run all of 0.30's checks again, without the one that must not refuse.

    Everything that vLLM checks before it has passed by then, and running it twice is what vLLM itself does.

    Raises:
        ValueError: whatever else vLLM refuses.
        RuntimeError: this release refuses the pair, but not in the way that is known here.
    """
    if inspect.getsource(check).count(FLAG) != 1:
        raise RuntimeError(f"this release of vLLM does not read {FLAG} exactly once in VllmConfig.__post_init__")
    config.model_config.enable_return_routed_experts = False
    try:
        check(config)
    finally:
        config.model_config.enable_return_routed_experts = True


def _check_aux_output(config: Any, check: Callable[[Any], None]) -> None:
    """Run the checks of routed experts again, as if there were no connector.

    Raises:
        ValueError: whatever else vLLM refuses.
    """
    connector = config.kv_transfer_config
    config.kv_transfer_config = None
    try:
        check(config)
    finally:
        config.kv_transfer_config = connector


def _may_lift(config: Any) -> bool:
    """This is the engine of a rollbus worker, which drops stale rows; others are none of our business."""
    is_worker = is_ours(getattr(config.parallel_config, "worker_extension_cls", None))
    return is_worker and routing_refusal(config.kv_transfer_config) is None
