"""Differences between releases of vLLM, tested with objects that have the shape of the later releases."""

import io
import multiprocessing
import os
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import EngineDead, InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.vllm import launch, plugin, processes
from rollbus.workers.engines.vllm.calls import Calls
from rollbus.workers.engines.vllm.engine import VllmEngine
from rollbus.workers.engines.vllm.feed import CoreFeed, _output
from rollbus.workers.engines.vllm.loads import LoadSerials, VllmAdapter
from rollbus.workers.engines.vllm.params import extra_names
from rollbus.workers.engines.vllm.processes import Cores
from rollbus.workers.engines.vllm.reload import Reload, compare_parameters
from tests.engine.vllm_contract.contract import CONTRACT
from tests.support.fleet import capabilities

REASON = "vLLM 0.32.0 returns no routed experts on a CPU"


class Executor:
    """The part of an executor that the tests need."""

    def __init__(self, config: str) -> None:
        self.config = config


def config_of(*, aux: bool | None, old: bool | None = None, num_experts: int = 16) -> Any:
    """Return a `VllmConfig` with the routing flag where 0.31 and later have it, or where 0.30 has it."""
    model: dict[str, Any] = {"get_num_experts": lambda: num_experts}
    if old is not None:
        model["enable_return_routed_experts"] = old
    config = SimpleNamespace(model_config=SimpleNamespace(**model))
    if aux is not None:
        config.aux_output_config = SimpleNamespace(enable_return_routed_experts=aux)
    return config


def test_the_stand_in_of_the_executor_passes_vllms_subclass_check() -> None:
    """The stand-in passes vLLM's check for a subclass, and its instances have the original class."""
    owned = processes.own_executor(Executor, None)

    assert issubclass(owned, Executor)
    assert type(owned("config")) is Executor
    assert owned("config").config == "config"


def test_a_process_that_unpickles_the_executor_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that unpickles the executor is adopt_line, with its owner's pid, before it has the class."""
    adopt_line: list[Any] = []
    before = multiprocessing.active_children()

    def adopt(executor_class: type, owner_pid: int, cores: Cores | None) -> type:
        adopt_line.append((owner_pid, cores))
        return executor_class

    adopt.__qualname__ = "adopt"
    adopt.__module__ = processes.__name__
    monkeypatch.setattr(processes, "adopt", adopt)
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(processes.own_executor(Executor, Cores(2, (0, 1))))

    assert ForkingPickler.loads(buffer.getvalue()) is Executor
    assert adopt_line == [(os.getpid(), Cores(2, (0, 1)))]
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize(
    ("config", "returns"),
    [
        (config_of(aux=None, old=True), True),
        (config_of(aux=None, old=False), False),
        (config_of(aux=True), True),
        (config_of(aux=False), False),
    ],
)
def test_the_routing_flag_is_read_from_the_configuration_of_each_release(config: Any, *, returns: bool) -> None:
    """The routing flag is in the model's configuration in 0.30, and in its own configuration later."""
    assert launch.returns_routing(config) is returns


def test_a_model_with_experts_but_without_routing_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with experts but without routing has a reason: the release on this platform, or the user.

    A model without experts has none.
    """
    monkeypatch.setattr(launch, "cpu_refusal", lambda: REASON)
    assert launch.routing_refusal(config_of(aux=False)) == REASON
    assert launch.routing_refusal(config_of(aux=True)) is None
    assert launch.routing_refusal(config_of(aux=False, num_experts=0)) is None
    monkeypatch.setattr(launch, "cpu_refusal", lambda: None)
    assert "'enable_return_routed_experts': false" in str(launch.routing_refusal(config_of(aux=False)))


def test_routing_is_off_with_a_warning_if_the_release_cannot_return_routing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the release returns no routing on this platform, routing is off with a warning.

    An explicit request for routing is rejected.
    """
    monkeypatch.setattr(launch, "cpu_refusal", lambda: REASON)

    assert launch._choose_routing({}, has_experts=True) is False
    assert [record.getMessage() for record in caplog.records] == [f"engine.routed_experts_disabled reason={REASON}"]
    assert launch._choose_routing({}, has_experts=False) is False
    assert len(caplog.records) == 1
    with pytest.raises(EngineDead, match=f"'enable_return_routed_experts' is true, but {REASON}; allowed here: false"):
        launch._choose_routing({"enable_return_routed_experts": True}, has_experts=True)
    monkeypatch.setattr(launch, "cpu_refusal", lambda: None)
    assert launch._choose_routing({}, has_experts=True) is True
    assert launch._choose_routing({"enable_return_routed_experts": False}, has_experts=True) is False


def test_an_error_of_vllm_about_routing_names_the_argument_that_helps() -> None:
    """An error of vLLM about routed experts is kept, with the argument that helps. Other errors do not change."""

    class Args:
        """Engine arguments that vLLM rejects."""

        def __init__(self, message: str) -> None:
            self.message = message

        def create_engine_config(self) -> None:
            """Raise the error."""
            raise ValueError(self.message)

    args: Any = Args("AuxOutput Connector requires prefix caching.")
    with pytest.raises(EngineDead, match=r"requires prefix caching.*'enable_return_routed_experts': false starts"):
        launch.engine_config(args)
    other: Any = Args("no such model")
    with pytest.raises(ValueError, match="no such model"):
        launch.engine_config(other)


def test_parameters_whose_results_no_message_can_carry_are_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private parameters of any release are no extras, nor are parameters whose results no message can carry."""

    class Params(msgspec.Struct):
        """The fields that 0.31 and 0.32 have added."""

        temperature: float = 1.0
        prompt_logprob_token_ids: list[int] | None = None
        prompt_logprob_start: int = 0
        watermarking: bool | None = None
        _watermarking_skipped: bool = False

    monkeypatch.setattr("vllm.SamplingParams", Params)

    assert extra_names(SimpleNamespace()) == ("watermarking",)


def test_a_failed_request_has_the_error_of_the_engine_or_a_reference_to_the_log() -> None:
    """An output of 0.33 contains the error of its request. For earlier releases, the message points to the log."""
    fields: dict[str, Any] = dict.fromkeys(
        ("events", "new_logprobs", "new_prompt_logprobs_tensors", "prefill_stats", "routed_experts", "stop_reason")
    )
    output: Any = SimpleNamespace(**fields, request_id="1", new_token_ids=[], finish_reason="error")

    assert _output(output).error == "the engine failed this request; its log gives the reason"
    output.error = SimpleNamespace(code="internal", message="the grammar cannot be compiled", retryable=False)
    assert _output(output).error == "the engine failed this request: the grammar cannot be compiled"
    assert _output(output).finish_reason is FinishReason.ERROR


def test_a_failed_load_restores_the_configuration_of_the_weights(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed load restores the folder, its revision and, from 0.32 on, the object store of the weights."""
    model_config = SimpleNamespace(model="/old", revision="main", model_weights="s3://old", quantization=None)

    def reload_weights(weights_path: str) -> None:
        model_config.model, model_config.revision, model_config.model_weights = weights_path, None, ""
        raise ValueError("no such tensor")

    runner = SimpleNamespace(model_config=model_config, get_model=torch.nn.Module)
    reload = Reload(SimpleNamespace(model_runner=runner, reload_weights=reload_weights))
    monkeypatch.setattr("rollbus.workers.engines.vllm.reload._find_unreadable", lambda _folder: None)
    monkeypatch.setattr(reload, "begin", lambda: None)
    monkeypatch.setattr(reload, "give_up", lambda: None)

    assert reload.load(str(tmp_path))["code"] is not None
    assert (model_config.model, model_config.revision, model_config.model_weights) == ("/old", "main", "s3://old")


@pytest.mark.parametrize(
    ("aux", "is_paused", "preempt", "wanted"),
    [
        (True, False, True, ["pause", "reset", "resume"]),
        (True, True, True, ["reset"]),
        (True, False, False, ["reset"]),
        (False, False, True, ["reset"]),
    ],
)
async def test_the_engine_pauses_while_running_requests_lose_their_cache(
    *, aux: bool, is_paused: bool, preempt: bool, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With routed experts of 0.31 and later, the engine pauses while running requests lose their cache."""
    done: list[str] = []
    engine = VllmEngine("/model")

    class RecordingCalls(Calls):
        """Records the calls."""

        async def call(self, name: str, *_: Any, **__: Any) -> bool:
            """Record the call."""
            done.append({"reset_prefix_cache": "reset", "engine_core.resume_scheduler_async": "resume"}[name])
            return True

    async def pause() -> None:
        done.append("pause")

    llm: Any = SimpleNamespace(vllm_config=config_of(aux=aux), engine_core=None)
    engine._controls = SimpleNamespace(calls=RecordingCalls(llm))  # type: ignore[assignment]
    engine._launch._llm = llm
    engine._is_paused = is_paused
    monkeypatch.setattr(engine, "pause", pause)

    assert await engine.reset_cache(preempt=preempt)
    assert done == wanted


class Transfer:
    """The part of vLLM's `KVTransferConfig` that the tests need."""

    kv_connector = "NixlConnector"
    kv_connector_module_path = None
    kv_connector_extra_config: ClassVar[dict[str, Any]] = {}


def checked_class() -> Any:
    """Return a `VllmConfig` class as in 0.31 and later, with its two rejections."""

    class VllmConfig:
        """Rejects routed experts with one connector, and with pipelines."""

        def __init__(self, *, is_ours: bool, num_stages: int = 1) -> None:
            name = "rollbus.workers.engines.vllm.extension.WorkerExtension" if is_ours else ""
            self.parallel_config = SimpleNamespace(worker_extension_cls=name)
            self.kv_transfer_config: Any = Transfer()
            self.num_stages = num_stages

        def _verify_aux_output_compatibility(self) -> None:
            if self.kv_transfer_config is not None:
                raise ValueError(
                    "--enable-return-routed-experts is incompatible with NixlConnector; PD auxiliary output is not "
                    "supported."
                )
            if self.num_stages > 1:
                raise ValueError("--enable-return-routed-experts is incompatible with pipeline parallelism (PP > 1).")

    return VllmConfig


def test_every_lifted_rejection_is_checked_in_vllms_sources() -> None:
    """The contract has the texts by which the plugin finds vLLM's rejections."""
    read = [item for need in CONTRACT if need.name == "VllmConfig" for item in need.reads.items()]
    missing = {
        refusal
        for method, refusal in plugin.REFUSALS.items()
        if not any(name == method and text in refusal for name, text in read)
    }

    assert missing == set()


@pytest.mark.slow
def test_the_later_rejection_is_lifted_only_for_engines_of_rollbus_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector is hidden from one check, only for a rollbus worker's engine, and then restored.

    Other configurations are rejected as before.
    """
    config_class = checked_class()
    monkeypatch.setattr("vllm.config.VllmConfig", config_class)
    plugin.install()
    plugin.install()

    config = config_class(is_ours=True)
    config._verify_aux_output_compatibility()
    assert isinstance(config.kv_transfer_config, Transfer)
    with pytest.raises(ValueError, match="NixlConnector"):
        config_class(is_ours=False)._verify_aux_output_compatibility()
    pipeline = config_class(is_ours=True, num_stages=2)
    with pytest.raises(ValueError, match="pipeline parallelism"):
        pipeline._verify_aux_output_compatibility()
    assert isinstance(pipeline.kv_transfer_config, Transfer)


@pytest.mark.parametrize(
    ("num_external", "start", "takes", "kept"),
    [
        (64, 99, True, 64),
        (64, 100, True, 64),
        (64, 98, True, 0),
        (64, 99, False, 0),
        # These are not whole blocks, so the first computed token would be inside of a block.
        (63, 99, True, 0),
    ],
)
def test_a_decode_phase_that_needs_no_prompt_rows_uses_its_kv(
    monkeypatch: pytest.MonkeyPatch, num_external: int, start: int, kept: int, *, takes: bool
) -> None:
    """A decode phase that needs no prompt rows uses its KV, although vLLM would compute the prompt again for rows."""

    class Connector:
        """The part of 0.33's `AuxOutputSchedulerConnector` that the test needs, without any rows."""

        _block_size = 32

        def cap_external_hit(self, _request: Any, _num_local: int, _num_external: int) -> int:
            return 0

    module: Any = SimpleNamespace(AuxOutputSchedulerConnector=Connector)
    monkeypatch.setattr("importlib.import_module", lambda _name: module)
    plugin.keep_external_hits()
    plugin.keep_external_hits()
    request: Any = SimpleNamespace(
        sampling_params=SimpleNamespace(routed_experts_prompt_start=start),
        num_prompt_tokens=100,
        kv_transfer_params={"do_remote_prefill": takes},
    )

    assert Connector().cap_external_hit(request, 0, num_external) == kept
    request.kv_transfer_params = None
    assert Connector().cap_external_hit(request, 0, num_external) == 0


def test_a_request_for_routing_is_rejected_with_the_announced_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for routing is rejected with the reason that the worker announces."""
    from rollbus.schemas.errors import ErrorCode, RequestRejected
    from rollbus.schemas.request import GenerateRequest
    from rollbus.workers.requests import admission

    request = GenerateRequest(prompt_token_ids=[1, 2], return_routed_experts=True)
    offered = msgspec.structs.replace(capabilities(), routed_experts=None, routing_refusal=REASON)

    with pytest.raises(RequestRejected, match=REASON) as refused:
        admission._check_offers(request, offered, SimpleNamespace())  # type: ignore[arg-type]
    assert refused.value.code is ErrorCode.UNSUPPORTED


# A request's priority reaches vLLM's scheduler only if its policy uses priorities.


if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams

pytestmark = pytest.mark.vllm

REQUEST = GenerateRequest(prompt_token_ids=[1, 2], priority=-7)


def options_of(request: GenerateRequest, policy: str) -> dict[str, Any]:
    """Return the arguments with which vLLM's input processor is called for a request, if the scheduler has `policy`."""
    given: dict[str, Any] = {}
    processor = SimpleNamespace(process_inputs=lambda *_, **options: given.update(options))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
    llm: Any = SimpleNamespace(vllm_config=config, input_processor=processor, engine_core=None)
    CoreFeed(llm, LoadSerials(), ["generate"]).convert("id", request, cast("VllmSamplingParams", None))
    return given


@pytest.mark.parametrize(("policy", "priority"), [("priority", -7), ("fcfs", 0)])
def test_only_a_scheduler_with_priorities_gets_the_requests_priority(policy: str, priority: int) -> None:
    """Under the policy `priority`, vLLM gets the request's priority. Other policies get 0, as vLLM rejects others."""
    assert options_of(REQUEST, policy)["priority"] == priority


# The trace headers of a request that vLLM receives.


TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"traceparent": TRACE}, {"traceparent": TRACE}),
        ({"traceparent": TRACE, "tracestate": "a=1,b=2"}, {"traceparent": TRACE, "tracestate": "a=1,b=2"}),
        # A trace state is valid only with a trace.
        ({"tracestate": "a=1"}, None),
    ],
)
def test_the_headers_of_a_trace_go_to_the_engine(given: dict[str, str], expected: dict[str, str] | None) -> None:
    """The engine gets both trace headers under their W3C names, or none if the request has no trace."""
    request = GenerateRequest(prompt_token_ids=[1], **cast("Any", given))

    assert options_of(request, "fcfs")["trace_headers"] == expected


# The loaded weights and adapters decide which requests share cached prefixes.


if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


def salt(loaded: LoadSerials, user: str | None = None, lora: str | None = None) -> str:
    """Return the salt of a request."""
    return loaded.salt_of(GenerateRequest(prompt_token_ids=[1], cache_salt=user, lora=lora))


def load(loaded: LoadSerials, name: str) -> None:
    """Load an adapter."""
    adapter = VllmAdapter(version=1, serial=loaded.new_serial(), lora_request=cast("LoRARequest", None))
    loaded.adapters[name] = adapter


@pytest.mark.proves("P80")
def test_requests_share_a_salt_only_with_equal_weights_adapter_and_user_salt() -> None:
    """Requests share a salt only if they have the same weights, adapter load and user salt.

    This holds for all characters in a user's salt.
    """
    loaded = LoadSerials()
    salts = [salt(loaded), salt(loaded, "a"), salt(loaded, "0:a"), salt(loaded, ":")]
    loaded.replace_weights()
    salts += [salt(loaded), salt(loaded, "a"), salt(loaded, "0:a")]
    load(loaded, "mine")
    salts += [salt(loaded, lora="mine"), salt(loaded, "a", lora="mine")]
    load(loaded, "mine")
    salts += [salt(loaded, lora="mine")]

    assert len(set(salts)) == len(salts)
    assert salt(loaded, "a") == salts[5]


def test_adapter_that_is_not_loaded_is_refused() -> None:
    """A request for an adapter that is not loaded is rejected, with the names of the loaded adapters."""
    loaded = LoadSerials()
    load(loaded, "mine")

    with pytest.raises(InvalidRequest, match="'other' is not loaded on this worker; allowed: mine"):
        salt(loaded, lora="other")


# The comparison of a model's parameters with the tensors of a checkpoint, without an engine.


def test_nan_in_a_checkpoint_is_told_from_a_parameter_that_was_not_loaded(tmp_path: Path) -> None:
    """A parameter with NaN in the files is reported as such, and not as one that was not loaded."""
    layers = {name: torch.nn.Linear(2, 2, bias=False) for name in ("same", "nan", "other")}
    model = torch.nn.ModuleDict(layers)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tensors["nan.weight"][0, 0] = torch.nan
    tensors["other.weight"] += 1
    layers["nan"].weight.data.copy_(tensors["nan.weight"])
    save_file(tensors, tmp_path / "model.safetensors")

    assert compare_parameters(model, tmp_path) == ({"same.weight"}, {"nan.weight"})
