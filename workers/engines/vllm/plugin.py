"""The plugin that lets vLLM return routed experts with a KV connector: a `vllm.general_plugins` entry point.

vLLM rejects this combination (config/vllm.py), because it cannot merge the routed experts of two engines. Release 0.30
rejects every connector, later releases only connectors that fetch KV from other engines. rollbus merges them: the rows
of the prompt come from the engine that computed its KV, and the copies of the other engine are discarded. vLLM checks
its configuration again in the engine core's process, so every process needs the plugin.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from .extension import is_ours
from .kv.config import TAKES_KV, connector_refusal

CHECK = "_verify_aux_output_compatibility"
"""Method of `VllmConfig` that rejects the combination since 0.31; in 0.30 it is `__post_init__`."""
REFUSALS = {
    CHECK: "; PD auxiliary output is not supported",
    "__post_init__": "--enable-return-routed-experts is incompatible with KV connectors",
}
"""Part of vLLM's error message, by the method that raises it."""
FLAG = "self.model_config.enable_return_routed_experts"
"""Flag that 0.30 reads once, before the checks of pipeline and context parallelism and of connectors, in this order."""
MARK = "_rollbus_lifts_refusal"


def install() -> None:
    """Allow the combination for engines of rollbus. vLLM calls this in each of its processes; safe to call twice."""
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
    """Let decode phases use transferred KV in an engine core of a rollbus worker; safe to call twice.

    With routed experts, vLLM 0.33 and later uses KV of another engine only if it has the rows of all its tokens.
    Otherwise it computes the prompt again. A decode phase wants no row before the last token of its prompt, and this
    engine computes that token.
    """
    try:
        # Imported by name, because the type checker reads only the installed release.
        scheduling = importlib.import_module("vllm.distributed.aux_output_connector.connector")
    except ModuleNotFoundError:
        # 0.30 stores the rows in another way.
        return
    cap: Any = getattr(scheduling.AuxOutputSchedulerConnector, "cap_external_hit", None)
    if cap is None or hasattr(cap, MARK):
        return

    @functools.wraps(cap)
    def capped(connector: Any, request: Any, num_local: int, num_external: int) -> int:
        num_kept: int = cap(connector, request, num_local, num_external)
        # The first computed token must begin a block of rows (worker.py: _publish_blocks).
        is_aligned = (num_local + num_external) % connector._block_size == 0
        return num_external if is_aligned and _needs_no_older_rows(request) else num_kept

    setattr(capped, MARK, True)
    scheduling.AuxOutputSchedulerConnector.cap_external_hit = capped


def _needs_no_older_rows(request: Any) -> bool:
    start = request.sampling_params.routed_experts_prompt_start
    is_decode_phase = bool((request.kv_transfer_params or {}).get(TAKES_KV))
    return is_decode_phase and start >= request.num_prompt_tokens - 1


def _check_all(config: Any, check: Callable[[Any], None]) -> None:
    """Run all checks of 0.30 again, except the check of connectors.

    All earlier checks of vLLM have passed before. A second run is safe, because vLLM itself also runs them twice.

    Raises:
        ValueError: another check of vLLM failed.
        RuntimeError: this release rejects the combination in an unknown way.
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
        ValueError: another check of vLLM failed.
    """
    connector = config.kv_transfer_config
    config.kv_transfer_config = None
    try:
        check(config)
    finally:
        config.kv_transfer_config = connector


def _may_lift(config: Any) -> bool:
    """True if this is an engine of a rollbus worker, which discards stale rows, with a supported connector.

    The checks of other engines stay unchanged.
    """
    is_worker = is_ours(getattr(config.parallel_config, "worker_extension_cls", None))
    return is_worker and connector_refusal(config.kv_transfer_config) is None
