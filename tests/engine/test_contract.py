"""The contract names all parts of vLLM that the adapter uses. No engine starts with a release that lacks a part."""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbus.schemas.errors import EngineDead
from rollbus.workers.engines.vllm.engine import VllmEngine
from rollbus.workers.engines.vllm.names import FIRST, NAMES, PAST, check_names
from tests.engine.vllm_contract.contract import CONTRACT, OTHERS
from tests.engine.vllm_contract.sources import find_gaps, release_in

ROOT = Path(__file__).resolve().parent.parent.parent
ADAPTER = ROOT / "workers" / "engines" / "vllm"
PARSERS = ROOT / "frontend" / "http" / "openai" / "parsers.py"
FILES = sorted(path for path in ADAPTER.rglob("*.py") if path.name != "names.py")

NOT_MODULES = {"vllm.general_plugins"}
"""Texts that look like names of vLLM's modules."""

VARIABLES = {
    "launch.py": {
        "args": "AsyncEngineArgs", "config": "VllmConfig", "model_config": "ModelConfig",
        "current_platform": "Platform"},
    "processes.py": {"args": "AsyncEngineArgs", "config": "VllmConfig", "parallel": "ParallelConfig"},
    "capabilities.py": {
        "config": "VllmConfig", "lora": "LoRAConfig", "model": "ModelConfig", "parallel": "ParallelConfig",
        "current_platform": "Platform"},
    "engine.py": {"llm": "AsyncLLM", "self._launch.llm": "AsyncLLM", "model_config": "ModelConfig"},
    "calls.py": {"self._llm": "AsyncLLM"},
    "feed.py": {
        "llm": "AsyncLLM", "self._llm": "AsyncLLM", "self._core": "AsyncMPClient", "output": "EngineCoreOutput",
        "outputs": "EngineCoreOutputs", "stats": "SchedulerStats", "prefill": "PrefillStats", "error": "RequestError",
        "event": "EngineCoreEvent"},
    "corrections.py": {
        "core": "EngineCore", "scheduler": "Scheduler", "request": "Request", "new": "NewRequestData",
        "scheduled": "SchedulerOutput", "output": "EngineCoreOutput", "outputs": "EngineCoreOutputs",
        "model_runner": "GPUModelRunner", "module": "RotaryEmbedding", "batch": "InputBatch"},
    "extension.py": {"worker": "Worker"},
    "reload.py": {
        "self._worker": "Worker", "self._runner": "GPUModelRunner", "transfer": "WeightTransferEngine",
        "info": "LayerReloadingInfo", "config": "ModelConfig"},
    "reload_checks.py": {"info": "LayerReloadingInfo"},
    "reload_repairs.py": {"info": "LayerReloadingInfo"},
    "kv/config.py": {"transfer": "KVTransferConfig", "model": "ModelConfig", "parallel": "ParallelConfig"},
    "kv/files.py": {
        "request": "Request", "output": "SchedulerOutput", "new": "NewRequestData", "cached": "CachedRequestData"},
    "kv/connector.py": {"request": "Request", "blocks": "KVCacheBlocks", "kv_cache_config": "KVCacheConfig"},
    "plugin.py": {"request": "Request", "connector": "AuxOutputSchedulerConnector"},
}  # fmt: skip
"""The vLLM class of each variable, by file."""

PARTS = {
    ("AsyncLLM", "engine_core"): "AsyncMPClient",
    ("AsyncLLM", "input_processor"): "InputProcessor",
    ("AsyncLLM", "vllm_config"): "VllmConfig",
    ("GPUModelRunner", "model_config"): "ModelConfig",
    ("GPUModelRunner", "discard_request_mask"): "CpuGpuBuffer",
    ("GPUModelRunner", "input_batch"): "InputBatch",
    ("SchedulerStats", "prefix_cache_stats"): "PrefixCacheStats",
    ("Request", "sampling_params"): "SamplingParams",
    ("VllmConfig", "aux_output_config"): "AuxOutputConfig",
    ("VllmConfig", "cache_config"): "CacheConfig",
    ("VllmConfig", "device_config"): "DeviceConfig",
    ("VllmConfig", "kv_transfer_config"): "KVTransferConfig",
    ("VllmConfig", "load_config"): "LoadConfig",
    ("VllmConfig", "lora_config"): "LoRAConfig",
    ("VllmConfig", "model_config"): "ModelConfig",
    ("VllmConfig", "parallel_config"): "ParallelConfig",
    ("VllmConfig", "scheduler_config"): "SchedulerConfig",
    ("Worker", "model_runner"): "GPUModelRunner",
    ("Worker", "weight_transfer_engine"): "WeightTransferEngine",
}
"""The vLLM class of an attribute of a vLLM class."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and the syntax tree of every file of the adapter."""
    for path in FILES:
        yield str(path.relative_to(ADAPTER)), ast.parse(path.read_text())


def known_members() -> dict[str, set[str]]:
    """Return the members that the contract names for each class, in any release."""
    known: dict[str, set[str]] = {}
    for need in CONTRACT:
        known.setdefault(need.name, set()).update(need.has.split(), need.calls, need.overrides)
    return known


def test_every_import_from_vllm_is_in_the_contract() -> None:
    """Each name or module that the adapter imports from vLLM, also for types only, is in the contract."""
    names = {(need.module, need.name) for need in CONTRACT}
    modules = {need.module for need in CONTRACT}
    missing = set()
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                missing |= {
                    f"{file}: {node.module}.{alias.name}"
                    for alias in node.names
                    if (node.module, alias.name) not in names and f"{node.module}.{alias.name}" not in modules
                }
            elif isinstance(node, ast.Import):
                found = {alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm"}
                missing |= {f"{file}: {name}" for name in found - modules}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                looks_like_one = re.fullmatch(r"vllm(\.[a-z_]\w*)+", node.value)
                if looks_like_one and node.value not in modules | NOT_MODULES:
                    missing.add(f"{file}: {node.value!r}")

    assert missing == set()


def test_every_used_attribute_of_a_vllm_object_is_in_the_contract() -> None:
    """Each attribute of a vLLM object that the adapter reads, sets or calls is in the contract of its class."""
    known = known_members()
    missing = set()
    seen = set()
    for file, tree in trees():
        variables = VARIABLES.get(file, {})
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            owner = class_of(node.value, variables)
            if owner is None:
                continue
            seen.add(file)
            if node.attr not in known[owner]:
                missing.add(f"{file}:{node.lineno}: {owner}.{node.attr}")

    assert missing == set()
    assert seen == set(VARIABLES)


def class_of(node: ast.expr, variables: dict[str, str]) -> str | None:
    """Return the vLLM class of an expression, or None if the tables above do not give it."""
    text = ast.unparse(node)
    if text in variables:
        return variables[text]
    if isinstance(node, ast.Attribute):
        owner = class_of(node.value, variables)
        return None if owner is None else PARTS.get((owner, node.attr))
    return None


def test_every_method_called_by_name_is_in_the_contract() -> None:
    """Methods that the adapter calls by name are in the contract, with the keywords that it passes."""
    methods: dict[str, str] = {}
    for need in CONTRACT:
        if need.name in ("AsyncLLM", "AsyncMPClient"):
            prefix = "" if need.name == "AsyncLLM" else "engine_core."
            methods |= {f"{prefix}{name}": call for name, call in need.calls.items()}
    in_core = {name for need in CONTRACT if need.name == "EngineCore" for name in need.calls}
    found = []
    for _, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("call", "on_replicas"):
                name = node.args[0]
                if isinstance(name, ast.Constant):
                    assert name.value in methods
                    assert node.func.attr == "call" or name.value in in_core
                    given = {keyword.arg for keyword in node.keywords}
                    assert given <= set(methods[name.value].partition("*")[2].split())
                    found.append(name.value)

    assert {"engine_core.pause_scheduler_async", "reset_prefix_cache", "remove_lora"} <= set(found)


def test_the_adapter_uses_every_member_of_the_contract() -> None:
    """The adapter, or the HTTP service's parsers, use each member that the contract names."""
    text = "\n".join(path.read_text() for path in (*FILES, PARSERS))
    unused = {
        f"{need.name or need.module}.{name}"
        for need in CONTRACT
        for name in (*need.has.split(), *need.calls)
        if not re.search(rf"\b{name}\b", text)
    }

    assert unused == set()


@pytest.mark.slow
def test_the_installed_release_keeps_the_contract() -> None:
    """The vLLM of this environment lacks nothing of the contract."""
    assert find_gaps(installed_vllm()) == ()


DOCTORED = [
    ("v1/engine/utils.py", "get_mp_context", "get_context", "vllm.v1.engine.utils has no 'get_mp_context'"),
    (
        "v1/engine/__init__.py",
        "    routed_experts: ",
        "    expert_rows: ",
        "vllm.v1.engine.EngineCoreOutput has no 'routed_experts'",
    ),
    (
        "v1/engine/__init__.py",
        "    new_token_ids: list[int]\n",
        "    step: int\n    new_token_ids: list[int]\n",
        "EngineCoreOutput has the positional parameters (request_id, step) but the adapter passes (request_id, new",
    ),
    (
        "inputs/engine.py",
        "def tokens_input(\n",
        "def tokens_input(\n    model: str,\n",
        "engine.tokens_input has the positional parameters (model) but the adapter passes (prompt_token_ids)",
    ),
    (
        "v1/engine/core_client.py",
        "def resume_scheduler_async(self)",
        "def resume_scheduler_async(self, mode: str)",
        "AsyncMPClient.resume_scheduler_async requires 'mode', which the adapter does not pass",
    ),
    ("v1/engine/core_client.py", "self.outputs_queue", "self.out_queue", "AsyncMPClient has no 'outputs_queue'"),
    (
        "distributed/kv_transfer/kv_connector/v1/base.py",
        "    @abstractmethod\n    def wait_for_save",
        "    @abstractmethod\n    def begin(self) -> None:\n        pass\n\n    @abstractmethod\n    def wait_for_save",
        "KVConnectorBase_V1 has the abstract method 'begin', which the adapter does not implement",
    ),
    (
        "v1/core/sched/output.py",
        "    new_block_ids: ",
        "    added_block_ids: ",
        "vllm.v1.core.sched.output.CachedRequestData has no 'new_block_ids'",
    ),
    (
        "v1/engine/exceptions.py",
        "class EngineDeadError(",
        "class EngineGoneError(",
        "vllm.v1.engine.exceptions has no 'EngineDeadError'",
    ),
    (
        "v1/engine/__init__.py",
        '"error", "repetition")',
        '"error", "timeout")',
        'vllm.v1.engine.FINISH_REASON_STRINGS is not ("stop", ',
    ),
    ("config/model.py", "    def get_num_experts(", "    def num_experts(", "has no method 'get_num_experts'"),
    # Overloads for type checkers precede the definition.
    (
        "v1/core/kv_cache_manager.py",
        "        allow_none: bool = False,\n",
        "        group: int,\n        allow_none: bool = False,\n",
        "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids requires 'group', which the adapter does not pass",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "old", "new", "gap"), DOCTORED)
def test_the_check_names_exactly_the_parts_that_a_doctored_release_lacks(
    tmp_path: Path, file: str, old: str, new: str, gap: str
) -> None:
    """A removed name, a renamed field and a changed signature are each named, and nothing else is named."""
    folder = doctored_vllm(tmp_path, file, old, new)

    gaps = find_gaps(folder)

    assert len(gaps) == 1
    assert gap in gaps[0]


@pytest.mark.vllm
async def test_an_engine_does_not_start_with_a_doctored_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start fails. The message names the release and the missing parts."""
    folder = doctored_vllm(tmp_path, "v1/engine/core_client.py", "self.outputs_queue", "self.out_queue")
    path = folder / "v1/engine/core_client.py"
    doctored = importlib.util.spec_from_file_location("vllm.v1.engine.core_client", path)
    monkeypatch.setitem(sys.modules, doctored.name, importlib.util.module_from_spec(doctored))
    doctored.loader.exec_module(sys.modules[doctored.name])
    gap = f"{doctored.name}.AsyncMPClient has no 'outputs_queue'; allowed: 0.30 to 0.33"

    with pytest.raises(EngineDead, match=f"vLLM {release_in(folder)} lacks parts that the rollbus worker uses: {gap}"):
        await VllmEngine("/model").start()


def test_a_start_checks_each_name_of_all_releases() -> None:
    """Of a class that a start checks, it checks each name that all releases have."""
    needs = [need for need in OTHERS if need.where in NAMES and need.since == FIRST and need.until > PAST]
    unchecked = {need.where: {*need.has.split(), *need.calls} - {*NAMES[need.where].split()} for need in needs}

    assert {where: names for where, names in unchecked.items() if names} == {}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("release", "outcome"), [("0.29.1", "refused"), ("0.33.2", None), ("0.34.0rc1", "logged"), ("1.0.0", "logged")]
)
def test_older_releases_are_rejected_and_newer_releases_start_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: str, outcome: Any
) -> None:
    """Older releases are rejected. Newer releases that have all names start with a warning."""
    monkeypatch.setattr("vllm.__version__", release)

    if outcome == "refused":
        with pytest.raises(EngineDead, match=r"vLLM 0\.29\.1 is too old .*; allowed: 0\.30 to 0\.33"):
            check_names()
    else:
        check_names()
    assert ("engine.unverified_release_detected" in caplog.text) == (outcome == "logged")


# Copies of the installed vLLM with one changed file; all other files are symbolic links.


def installed_vllm() -> Path:
    """Return the folder of the installed package."""
    spec = importlib.util.find_spec("vllm")
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def doctored_vllm(root: Path, file: str, old: str, new: str, source: Path | None = None) -> Path:
    """Make a package `vllm` below `root` with each `old` in `file` replaced by `new`; return its folder.

    The text `old` must occur in the file.

    Args:
        source: the package to copy; the installed vLLM by default.
    """
    source = source or installed_vllm()
    folder = root / "vllm"
    _link(source, folder, Path(file).parts)
    text = (source / file).read_text()
    assert old in text, f"{file} has no {old!r}"
    (folder / file).unlink()
    (folder / file).write_text(text.replace(old, new))
    return folder


def _link(source: Path, target: Path, way: tuple[str, ...]) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name == way[0] and len(way) > 1:
            _link(entry, target / entry.name, way[1:])
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
