"""The plugin that lets vLLM return routed experts although it has a KV connector: a `vllm.general_plugins` entry point.

vLLM 0.30 refuses the two together (config/vllm.py: VllmConfig.__post_init__), as it cannot merge what two engines know.
Here they are merged: the prompt's rows come from where its KV was computed, and the others' copies are dropped. vLLM
checks its configuration again in the engine core's process, so the plugin has to be in every process.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from workers.engines.vllm.extension import is_ours
from workers.engines.vllm.kv.config import routing_refusal

__all__ = ["install"]

REFUSAL = "--enable-return-routed-experts is incompatible with KV connectors"
"""What vLLM says."""
FLAG = "self.model_config.enable_return_routed_experts"
"""What it reads, once: the checks under it are those of pipeline and context parallelism, and then this one."""
MARK = "_rollbus_lifts_refusal"


def install() -> None:
    """Lift the refusal for rollbus's own engines; called by vLLM in each of its processes, harmless when repeated."""
    from vllm.config import VllmConfig

    check = VllmConfig.__post_init__
    if hasattr(check, MARK):
        return

    @functools.wraps(check)
    def post_init(config: Any) -> None:
        _check(config, check)

    setattr(post_init, MARK, True)
    VllmConfig.__post_init__ = post_init


def _check(config: Any, check: Callable[[Any], None]) -> None:
    """Run vLLM's check; where it ends in the refusal and need not, run it again without that one part.

    Everything that vLLM checks before it has passed by then, and running it twice is what vLLM itself does.

    Raises:
        ValueError: whatever else vLLM refuses.
        RuntimeError: this release refuses the pair, but not in the way that is known here.
    """
    try:
        check(config)
    except ValueError as exc:
        if REFUSAL not in str(exc) or not _may_lift(config):
            raise
    else:
        return
    if inspect.getsource(check).count(FLAG) != 1:
        raise RuntimeError(f"this release of vLLM does not read {FLAG} exactly once in VllmConfig.__post_init__")
    config.model_config.enable_return_routed_experts = False
    try:
        check(config)
    finally:
        config.model_config.enable_return_routed_experts = True


def _may_lift(config: Any) -> bool:
    """This is the engine of a rollbus worker, which drops stale rows; others are none of our business."""
    is_worker = is_ours(getattr(config.parallel_config, "worker_extension_cls", None))
    return is_worker and routing_refusal(config.kv_transfer_config) is None
