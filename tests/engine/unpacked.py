"""Run the adapter with an unpacked vLLM: `python -m tests.engine.unpacked` prints the results.

The unpacked release is first on the path. Nothing of it is compiled, and no engine starts.
"""

import asyncio
import copyreg
import importlib
import io
import json
import os
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm import plugin
from rollbus.workers.engines.vllm.feed import CoreFeed
from rollbus.workers.engines.vllm.launch import set_environment
from rollbus.workers.engines.vllm.loads import LoadSerials
from rollbus.workers.engines.vllm.outputs import OpenRequests
from rollbus.workers.engines.vllm.processes import own_executor
from tests.engine.hand_rows import HAND_ROWS, PROMPT_LEN, START, TOKENS

ROUTING = RoutedExpertsInfo(num_layers=2, top_k=2, num_experts=16, dtype="u1")


def steps_of_the_engine(engine_id: str) -> list[Any]:
    """Return the steps that this release's engine core sends for a prompt and three tokens.

    They are encoded and decoded by the release's own classes.
    """
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    steps = []
    rows = rows_of_the_release()
    for number, token in enumerate(TOKENS):
        table = (np.array([[token]]), np.array([[-0.5]], np.float32), np.array([1]))
        is_last = number == len(TOKENS) - 1
        output = EngineCoreOutput(
            engine_id,
            [token],
            new_logprobs=LogprobsLists(*table),
            finish_reason=FinishReason.LENGTH if is_last else None,
            routed_experts=rows[number],
            prefill_stats=None if number else PrefillStats(num_prompt_tokens=PROMPT_LEN, num_cached_tokens=32),
        )
        steps.append(EngineCoreOutputs(outputs=[output]))
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    return [decoder.decode(encoder.encode(step)) for step in steps]


def aux_output() -> Any:
    """Return the module that cuts rows, imported by name, as the type checker reads only the installed release."""
    return importlib.import_module("vllm.distributed.aux_output_connector.connector")


def rows_of_the_release() -> list[Any]:
    """Return the rows of each step, as the release's scheduler cuts them from its workers' captured rows."""
    scheduling = aux_output()
    scheduler = scheduling.AuxOutputSchedulerConnector.__new__(scheduling.AuxOutputSchedulerConnector)
    found = []
    emitted = START
    for number in range(len(TOKENS)):
        # The last sampled token has not been through the model.
        num_tokens = PROMPT_LEN + number + 1
        request: Any = SimpleNamespace(request_id="r", num_tokens=num_tokens, is_finished=lambda: False)
        # The capture has one row too many, as when the next step was scheduled before this step was read.
        captured = scheduling.AuxRequestOutput(emitted, HAND_ROWS[emitted - START : num_tokens - START])
        found.append(scheduler.take_output(request, {"r": captured}))
        emitted = num_tokens - 1
    return found


async def read(steps: list[Any], requests: OpenRequests) -> list[RequestStep]:
    """Return the steps that the adapter reads from an engine core's steps."""
    core = SimpleNamespace(outputs_queue=asyncio.Queue())
    feed = CoreFeed(SimpleNamespace(engine_core=core), LoadSerials(), ())
    found: list[Any] = []
    for step in steps:
        core.outputs_queue.put_nowait(step)
        made, broken = requests.read(await feed.next())
        assert not broken
        found += made
    return found


def fed() -> dict[str, Any]:
    """Return the adapter's results of one request."""
    requests = OpenRequests(ROUTING)
    sampling = SamplingParams(max_tokens=len(TOKENS), logprobs=0)
    request = GenerateRequest(
        prompt_token_ids=[5] * PROMPT_LEN,
        sampling=sampling,
        routed_experts_prompt_start=START,
        return_routed_experts=True,
    )
    steps: list[Any] = asyncio.run(read(steps_of_the_engine(requests.add("k", request)), requests))
    return {
        "tokens": [int(token) for step in steps for token in step.token_ids],
        "rows": np.concatenate([step.routed_experts for step in steps]).tolist(),
        "first_row": steps[0].routed_experts_start,
        "cached_tokens": steps[0].cached_tokens,
        "finish_reason": str(steps[-1].finish_reason),
    }


def failed() -> str | None:
    """Return the error of a request that the engine has failed, or None if the release gives no reason."""
    from vllm import outputs
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    if "error" not in EngineCoreOutput.__struct_fields__:
        return None
    requests = OpenRequests(None)
    engine_id = requests.add("k", GenerateRequest(prompt_token_ids=[5], sampling=SamplingParams()))
    error = outputs.RequestError(code="internal", message="no room", retryable=True)
    output = EngineCoreOutput(engine_id, [], finish_reason=FinishReason.ERROR, error=error)
    return asyncio.run(read([EngineCoreOutputs(outputs=[output])], requests))[0].error


def flag_is_copied() -> bool:
    """Return True if the routing flag of the arguments reaches the place where the release keeps it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = AsyncEngineArgs(model=str(Path.cwd()), enable_return_routed_experts=True)
    return bool(args.aux_output_config.enable_return_routed_experts)


def executor_is_accepted() -> bool:
    """Return True if the release accepts the adapter's executor as its own kind, and pickles it."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import UniProcExecutor

    owned = own_executor(UniProcExecutor)
    with utils._configure_uniproc_startup_threads(owned, 1):
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(owned)
    return ForkingPickler.loads(buffer.getvalue()) is UniProcExecutor and type(owned) in copyreg.dispatch_table


def refusal_is_lifted() -> bool:
    """Return True if a rollbus worker's engine may have a connector with routed experts, and another engine may not."""
    from vllm.config import KVTransferConfig, VllmConfig

    plugin.install()
    told = []
    for name in ("rollbus.workers.engines.vllm.extension.WorkerExtension", ""):
        parallel = SimpleNamespace(
            worker_extension_cls=name,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        )
        config = SimpleNamespace(
            aux_output_config=SimpleNamespace(enabled=True),
            use_v2_model_runner=True,
            model_config=SimpleNamespace(runner_type="generate", is_moe=True),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            speculative_config=None,
            parallel_config=parallel,
            kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
        )
        try:
            VllmConfig._verify_aux_output_compatibility(config)
        except ValueError as exc:
            told.append(str(exc))
        else:
            told.append("")
    return not told[0] and "PD auxiliary output is not supported" in told[1]


def external_hit() -> int | None:
    """Return how many of 64 offered tokens a decode phase keeps although the release has no rows for them."""
    connector = aux_output().AuxOutputSchedulerConnector
    if not hasattr(connector, "cap_external_hit"):
        return None
    plugin.keep_external_hits()
    scheduler: Any = connector.__new__(connector)
    scheduler._block_size, scheduler._hash_block_size = 32, 32
    request = SimpleNamespace(
        block_hashes=[],
        num_tokens=100,
        num_prompt_tokens=100,
        sampling_params=SimpleNamespace(routed_experts_prompt_start=99),
        kv_transfer_params={"do_remote_prefill": True},
    )
    kept: int = scheduler.cap_external_hit(request, 0, 64)
    request.kv_transfer_params["do_remote_prefill"] = False
    assert scheduler.cap_external_hit(request, 0, 64) == 0
    return kept


def main() -> None:
    """Print all results."""
    # Libraries may print to stdout.
    stdout = os.dup(1)
    os.dup2(2, 1)
    set_environment("", None)
    import vllm

    found = {
        "release": vllm.__version__,
        "folder": str(Path(vllm.__file__).parent),
        "fed": fed(),
        "failed": failed(),
        "flag_is_copied": flag_is_copied(),
        "executor_is_accepted": executor_is_accepted(),
        "refusal_is_lifted": refusal_is_lifted(),
        "external_hit": external_hit(),
    }
    os.write(stdout, json.dumps(found).encode())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
