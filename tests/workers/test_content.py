"""Digests of checkpoints and adapters: what they depend on, and when a machine hashes a file again."""

import base64
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.canary import agrees, canary_request, canary_rows, check_expected
from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.schemas.errors import ControlCode, ControlError, InvalidRequest
from rollbus.schemas.presence import Capabilities
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import Rows
from rollbus.schemas.weights import Canary, WeightSource
from rollbus.workers.control.canary import own_request, read_canary
from rollbus.workers.control.staging import StageKey
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.requests.admission import Versions, check_request
from rollbus.workers.sources import content
from rollbus.workers.sources.sources import WeightSources
from tests.support.checkpoints import ignore, write_adapter, write_checkpoint, write_safetensors, write_sharded
from tests.workers.control_support import load_lora, rig, source, update


def sources(tmp_path: Path, name: str = "w1") -> WeightSources:
    """Return the sources of one worker process of a machine."""
    return WeightSources(roots=(tmp_path,), own=None, cache=tmp_path / "cache", model="m", worker=name, objects=None)


async def digest(of: WeightSources, folder: Path, *, is_adapter: bool = False) -> str:
    """Stage a directory, and return the digest of its content."""
    source = WeightSource(path=str(folder))
    staged = await (of.adapter(source, ignore) if is_adapter else of.checkpoint(source, ignore))
    found = of.digest_of(staged)
    assert found is not None
    return found


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each tensor that is hashed."""
    names: list[str] = []
    run: Callable[..., None] = content._hash_tensor

    def count(name: str, *others: object) -> None:
        names.append(name)
        run(name, *others)

    monkeypatch.setattr(content, "_hash_tensor", count)
    return names


async def test_the_digest_depends_on_tensors_only(tmp_path: Path) -> None:
    """Shards, other files, padding and the order of tensors do not change the digest; values, names and dtypes do."""
    shapes = {"a": (2, 4), "b": (4,)}
    one = write_checkpoint(tmp_path / "one", shapes)
    two = write_sharded(tmp_path / "two", {"b": (4,), "x": (0,), "a": (2, 4)})
    three = write_checkpoint(tmp_path / "three", {"b": (4,), "a": (2, 4), "x": (0,)})
    padded = tmp_path / "four"
    shutil.copytree(three, padded)
    (padded / "config.json").write_text("{}")
    data = (padded / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    (padded / "model.safetensors").write_bytes(
        (size + 8).to_bytes(8, "little") + data[8 : 8 + size] + b" " * 8 + data[8 + size :]
    )
    own = sources(tmp_path)

    same = {await digest(own, folder) for folder in (two, three, padded)}
    others = [
        await digest(own, one),
        await digest(own, write_checkpoint(tmp_path / "five", shapes, fill=1)),
        await digest(own, write_checkpoint(tmp_path / "six", {"a": (4, 2), "b": (4,)})),
        await digest(own, write_checkpoint(tmp_path / "seven", {"a": (2, 4), "c": (4,)})),
    ]
    assert len(same) == 1
    assert len({*same, *others}) == 5


async def test_the_config_of_an_adapter_is_part_of_its_digest(tmp_path: Path) -> None:
    """Equal tensors with another `lora_alpha` are another adapter."""
    own = sources(tmp_path)
    one, two = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two", lora_alpha=32)
    same = Path(shutil.copytree(one, tmp_path / "same"))

    digests = [await digest(own, folder, is_adapter=True) for folder in (one, two, same)]
    assert digests[0] == digests[2] != digests[1]


async def test_a_machine_hashes_a_settled_file_once(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the machine takes the digests of a file that was settled when it was hashed."""
    monkeypatch.setattr(content, "SETTLED_NS", 0)
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    first = await digest(sources(tmp_path), folder)
    second = await digest(sources(tmp_path, "w2"), folder)

    assert first == second
    assert hashed == ["a"]


async def test_a_young_file_is_hashed_again(tmp_path: Path, hashed: list[str]) -> None:
    """The digests of a file that changed in the last two seconds are not kept for other processes."""
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    for name in ("w1", "w2"):
        await digest(sources(tmp_path, name), folder)

    assert hashed == ["a", "a"]


@pytest.mark.parametrize("change", ["in place", "replaced"])
async def test_a_change_that_keeps_size_and_time_is_found(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other content of the same size and modification time is hashed again, by the same and by other processes."""
    monkeypatch.setattr(content, "SETTLED_NS", 0)
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    file, own = folder / "model.safetensors", sources(tmp_path)
    before, stat = await digest(own, folder), file.stat()
    if change == "replaced":
        write_safetensors(tmp_path / "new", {"a": (2,)}, fill=1).rename(file)
    else:
        write_safetensors(file, {"a": (2,)}, fill=1)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert before != await digest(own, folder) == await digest(sources(tmp_path, "w2"), folder)


async def test_a_file_that_changes_while_it_is_hashed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a mix of two contents would be worthless."""
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    file, run = folder / "model.safetensors", content.hash_range

    def overwrite(*args: Any) -> str:
        digest = run(*args)
        write_safetensors(file, {"a": (2,)}, fill=1)
        os.utime(file, ns=(0, 0))
        return digest

    monkeypatch.setattr(content, "hash_range", overwrite)
    with pytest.raises(ControlError, match=f"{file} changed while it was hashed") as raised:
        await digest(sources(tmp_path), folder)
    assert raised.value.code is ControlCode.STORAGE


async def test_a_start_checkpoint_that_changes_while_it_is_hashed_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine loads the checkpoint at the same time, so nobody knows what it has read."""
    run = content.hash_range

    def overwrite(*args: Any) -> str:
        digest = run(*args)
        os.utime(tmp_path / "own" / "model.safetensors", ns=(0, 0))
        return digest

    async with rig(tmp_path, prove_reload=False) as worker:
        monkeypatch.setattr(content, "hash_range", overwrite)
        await worker.weights.start.run(None)
        await worker.weights.verify_start()
        assert worker.standing == (1, True)
        assert worker.weights.problem == f"{tmp_path / 'own'} changed during the load"


async def test_digests_need_no_writable_cache(tmp_path: Path, hashed: list[str]) -> None:
    """If the cache cannot be written, each process hashes for itself."""
    (tmp_path / "cache").write_text("no directory")
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    assert await digest(sources(tmp_path), folder) == await digest(sources(tmp_path, "w2"), folder)
    assert hashed == ["a", "a"]


async def test_remains_of_a_full_disk_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of digests that could not be written, or whose writer was killed, are deleted like the oldest digests."""
    monkeypatch.setattr(content, "MAX_KEPT", 1)
    kept = tmp_path / "cache/shared.weights/digests"
    kept.mkdir(parents=True)
    for name in ".01", ".23":
        (kept / name).touch()
    await digest(sources(tmp_path), write_checkpoint(tmp_path / "one", {"a": (2,)}))
    assert sorted(path.suffix for path in kept.iterdir()) == ["", ".lock"]


async def test_other_formats_are_whole_files(tmp_path: Path) -> None:
    """A start checkpoint without safetensors files has the digest of the bytes of its weight files."""
    digests = []
    for name, data in (("one", b"x"), ("two", b"x"), ("three", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(data)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(name))
        own = WeightSources(
            roots=(), own=tmp_path / name, cache=tmp_path / "cache", model="m", worker="w", objects=None
        )
        digests.append(await own.start_digest())
    assert digests[0] == digests[1] != digests[2]


async def test_an_error_of_the_engine_is_explained_by_a_change_of_the_files(tmp_path: Path) -> None:
    """If the engine rejects weights because files changed during the load, the error says so."""

    class Comparing(SyntheticEngine):
        async def load_weights(self, path: Path) -> None:
            """Fail as an engine that compares its weights with files that have changed."""
            if path.name == "2":
                write_checkpoint(path, fill=7)
                os.utime(path / "model.safetensors", ns=(0, 0))
                raise ControlError(ControlCode.HALF_WRITTEN, "did not load lm_head.weight")
            await super().load_weights(path)

    async with rig(tmp_path, SyntheticConfig(), engine=Comparing) as worker:
        path = worker.checkpoint("2", 2)
        with pytest.raises(ControlError, match=f"{path}/.* changed during the load") as raised:
            await worker.weights.update(update(path, 2), worker.report)
        assert raised.value.code is ControlCode.HALF_WRITTEN
        assert worker.standing == (1, True)


async def test_weights_with_the_recorded_digest_are_current_wherever_they_came_from(tmp_path: Path) -> None:
    """A worker that holds the recorded content applies the version without a load, and refuses other content."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        await worker.weights.update(update(path, 2), worker.report)
        held = worker.weights.digest
        worker.stages.clear()
        write_checkpoint(path, fill=3)
        await worker.weights.update(update(tmp_path / "gone", 2, digest=held), worker.report)
        assert worker.stages == []
        with pytest.raises(ControlError, match=f"version 3 was {held}; {path} now holds ") as raised:
            await worker.weights.update(update(path, 3, digest=held), worker.report)
        assert raised.value.code is ControlCode.OTHER_CONTENT
        assert worker.standing == (2, False)


async def test_an_adapter_is_loaded_only_with_its_recorded_content(tmp_path: Path) -> None:
    """An adapter whose files hold other content than recorded is not loaded."""
    async with rig(tmp_path) as worker:
        path = worker.adapter("1", 1)
        with pytest.raises(ControlError, match=r"version 1 of adapter a was 0{64}; ") as raised:
            await worker.loras.load(load_lora("a", path, 1, digest="0" * 64), worker.report)
        assert raised.value.code is ControlCode.OTHER_CONTENT
        assert worker.links.versions.loras == {}


async def test_weights_with_the_recorded_digest_are_restored_from_the_recorded_source(tmp_path: Path) -> None:
    """A version that is recorded again from another directory does not need the first directory any more."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        await worker.weights.update(update(path, 2), worker.report)
        moved = path.rename(tmp_path / "moved")
        await worker.weights.update(update(moved, 2, digest=worker.weights.digest), worker.report)
        await worker.weights.restore(worker.report, 60.0)
        assert worker.standing == (2, False)


async def test_an_adapter_with_the_recorded_digest_is_reloaded_from_the_recorded_source(tmp_path: Path) -> None:
    """An adapter that is recorded again from another directory does not need the first directory any more."""
    async with rig(tmp_path) as worker:
        worker.engine.faults = SyntheticFaults(loses_loras=True)
        path = worker.adapter("1", 1)
        staged = await worker.stager.stage(StageKey(source(path), is_adapter=True))
        await worker.loras.load(load_lora("a", path, 1, digest=staged.digest), worker.report)
        moved = path.rename(tmp_path / "moved")
        worker.stages.clear()
        await worker.loras.load(load_lora("a", moved, 1, digest=staged.digest), worker.report)
        assert worker.stages == []
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        assert worker.loras.lost == {}
        assert worker.links.versions.loras == {"a": 1}


# The format of a canary, results that are no canary, and the comparison of two canaries.


PROMPT_LEN, NUM_TOKENS, NUM_LAYERS, TOP_K = 20, 4, 5, 2


def rows(dtype: str = "u1") -> Rows:
    """Return rows with distinct, ascending experts in every place."""
    first = np.arange((PROMPT_LEN + NUM_TOKENS - 1) * NUM_LAYERS).reshape(-1, NUM_LAYERS) % 100
    return np.stack([first, first + 100], axis=-1).astype(dtype)


def canary(routing: Rows | None = None, **fields: Any) -> Canary:
    """Return a canary with `routing`, or with `rows()`."""
    routing = rows() if routing is None else routing
    made = Canary(
        token_ids=(5, 6, 7, 8),
        logprobs=(-1.0, -2.0, -3.0, -4.0),
        routed_experts=base64.b64encode(routing.tobytes()).decode(),
        shape=(len(routing), NUM_LAYERS, TOP_K),
    )
    return replace(made, **fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row_dtype", ["u1", "<u2"])
def test_equal_canaries_agree(dtype: str, row_dtype: str) -> None:
    """A canary agrees with itself for all dtypes."""
    assert agrees(canary(rows(row_dtype)), canary(rows(row_dtype)), dtype=dtype) is None


def test_a_model_without_experts_has_a_canary_too() -> None:
    """Without routed experts, tokens and log probabilities decide. A canary with routed experts does not agree."""
    dense = canary(routed_experts=None, shape=None)

    assert agrees(dense, dense, dtype="float32") is None
    assert agrees(dense, canary(), dtype="float32") is not None


def test_canaries_in_float32_are_compared_tightly() -> None:
    """In float32, one other token, one other expert or 2e-3 in a log probability are too much. 5e-4 is not."""
    one_off = rows().copy()
    one_off[3, 2, 1] = 250

    assert "tokens differ from number 3" in (agrees(canary(), canary(token_ids=(5, 6, 7, 9)), dtype="float32") or "")
    assert "expert choices" in (agrees(canary(), canary(one_off), dtype="float32") or "")
    assert "logprobs differ" in (agrees(canary(), canary(logprobs=(-1.0, -2.0, -3.0, -4.002)), dtype="float32") or "")
    assert agrees(canary(), canary(logprobs=(-1.0, -2.0, -3.0, -4.0005)), dtype="float32") is None


def test_canaries_in_bfloat16_may_differ_by_rounding() -> None:
    """In bfloat16, 0.1 in a log probability and one expert in twenty count as rounding.

    A third of the experts does not.
    """
    few, many = rows().copy(), rows().copy()
    few[::10, :, 1] = 250
    many[::3, :, :] = 250

    assert agrees(canary(), canary(few, logprobs=(-1.1, -2.0, -3.0, -4.0)), dtype="bfloat16") is None
    assert "expert choices" in (agrees(canary(), canary(many), dtype="bfloat16") or "")
    assert "logprobs differ" in (agrees(canary(), canary(logprobs=(-1.3, -2, -3, -4)), dtype="bfloat16") or "")


def test_results_after_the_first_different_token_are_not_compared_in_bfloat16() -> None:
    """The results after the first different token are not compared. The log probability of that token must agree."""
    after_tie = rows().copy()
    after_tie[PROMPT_LEN + 1 :] = 250
    tie = canary(after_tie, token_ids=(5, 9, 1, 1), logprobs=(-1.0, -2.1, -9.0, -9.0))
    no_tie = replace(tie, logprobs=(-1.0, -2.9, -9.0, -9.0))

    assert agrees(canary(), tie, dtype="bfloat16") is None
    assert "logprobs differ" in (agrees(canary(), no_tie, dtype="bfloat16") or "")


def test_the_order_of_experts_in_a_row_does_not_count() -> None:
    """The order of a row's experts does not count: engines do not sort them, and trainers need not."""
    assert agrees(canary(), canary(np.ascontiguousarray(rows()[..., ::-1])), dtype="float32") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": (float("nan"), -2.0, -3.0, -4.0)},
        {"token_ids": ()},
        {"logprobs": (-1.0,)},
        {"token_ids": (5,), "logprobs": (-1.0,)},
        {"routed_experts": "no base64!"},
        {"shape": (1, 2, 3)},
        {"shape": (-23, -5, 2)},
        {"shape": (23, -5, -2)},
        {"shape": (23, -1, -1), "routed_experts": base64.b64encode(bytes(23)).decode()},
        {"shape": (23, 0, 0), "routed_experts": ""},
        {"shape": None},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_invalid_canary_agrees_with_no_canary(fields: dict[str, Any], dtype: str) -> None:
    """NaN, missing tokens and routing that contradicts its shape cause a reported difference, never an exception."""
    assert agrees(canary(), canary(**fields), dtype=dtype) is not None
    assert agrees(canary(**fields), canary(), dtype=dtype) is not None


def test_many_experts_are_compared_in_little_memory() -> None:
    """A worker may claim any shape that fills a message.

    The memory of the comparison grows with the size of the shape, not with its square.
    """
    shape = (4, 1, 10_000)
    some, others = (np.full(shape, expert, np.uint8) for expert in (1, 2))
    huge = (base64.b64encode(routing.tobytes()).decode() for routing in (some, others))
    one, other = (canary(routed_experts=encoded, shape=shape) for encoded in huge)

    tracemalloc.start()
    try:
        assert "0.0% of the expert choices" in (agrees(one, other, dtype="float32") or "")
        assert tracemalloc.get_traced_memory()[1] < 50 * some.nbytes
    finally:
        tracemalloc.stop()


def test_an_expected_canary_must_have_the_requested_tokens_and_valid_routing() -> None:
    """An expected canary is checked before any change.

    It must have the requested number of tokens, and routing of the model's shape or none.
    """
    request = canary_request(model())
    read = read_canary(steps_of(request), request, model())
    dense = SyntheticConfig(max_model_len=1000, vocab_size=50, num_experts=0).capabilities

    check_expected(read, model())
    check_expected(replace(read, routed_experts=None, shape=None), model())
    wrong = (
        (replace(read, token_ids=read.token_ids[1:]), model(), "has 7 tokens and 8 logprobs"),
        (replace(read, token_ids=(), logprobs=()), model(), "has 0 tokens"),
        (replace(read, routed_experts="?"), model(), "not valid base64"),
        (canary(token_ids=read.token_ids, logprobs=read.logprobs), model(), "has routed experts of shape"),
        (read, dense, "allowed: none"),
    )
    for expected, capabilities, problem in wrong:
        with pytest.raises(InvalidRequest, match=problem) as caught:
            check_expected(expected, capabilities)
        assert caught.value.field == "expected_canary"


def steps_of(request: GenerateRequest) -> list[RequestStep]:
    """Return the steps of a correct engine for a canary request: the prompt with its rows, then single tokens."""
    limit = request.sampling.max_tokens
    assert limit is not None
    row = np.array([[[3, 1], [4, 2]]], np.uint8)
    return [
        RequestStep(
            key="k",
            token_ids=np.array([number], np.int32),
            logprobs=np.array([-0.5 * number], np.float32),
            routed_experts=np.repeat(row, request.prompt_len if number == 0 else 1, axis=0),
        )
        for number in range(limit)
    ]


def model(max_model_len: int = 1000) -> Capabilities:
    """Return the capabilities of a model with two layers."""
    return SyntheticConfig(
        max_model_len=max_model_len, vocab_size=50, num_layers=2, top_k=2, num_experts=8
    ).capabilities


def test_a_canary_holds_tokens_logprobs_and_sorted_rows() -> None:
    """A canary holds all results of the engine, with each row's experts in ascending order."""
    request = canary_request(model())
    read = read_canary(steps_of(request), request, model())
    rows_read = canary_rows(read)

    assert read.token_ids == tuple(range(8))
    assert read.logprobs == tuple(-0.5 * number for number in range(8))
    assert rows_read.shape == (request.prompt_len + 7, 2, 2)
    assert rows_read[0].tolist() == [[1, 3], [2, 4]]


@pytest.mark.parametrize("max_model_len", [2, 10, 1000])
def test_the_canary_request_is_valid_for_every_context_length(max_model_len: int) -> None:
    """The canary request passes the worker's checks for every context length. Two requests share no cached prefix."""
    first, second = own_request(model(max_model_len)), own_request(model(max_model_len))

    check_request(first, model(max_model_len), Versions(0, 0))
    assert first.prompt_len + (first.sampling.max_tokens or 0) <= max_model_len
    assert list(first.prompt_token_ids) == list(second.prompt_token_ids)
    assert first.cache_salt != second.cache_salt


def lost_logprobs(step: RequestStep) -> None:
    """Simulate an engine that lost its log probabilities."""
    step.logprobs = None


def not_a_number(step: RequestStep) -> None:
    """Simulate weights that overflow."""
    step.logprobs = np.array([np.nan], np.float32)


def lost_row(step: RequestStep) -> None:
    """Simulate routed experts that did not arrive."""
    step.routed_experts = None


def lost_token(step: RequestStep) -> None:
    """Simulate a generation that ended early."""
    step.token_ids = np.empty(0, np.int32)


@pytest.mark.parametrize("spoil", [lost_logprobs, not_a_number, lost_row, lost_token])
def test_results_with_missing_or_impossible_parts_are_no_canary(spoil: Callable[[RequestStep], None]) -> None:
    """Results with missing or impossible parts are never a canary."""
    request = canary_request(model())
    steps = steps_of(request)
    spoil(steps[3])
    with pytest.raises(ControlError) as caught:
        read_canary(steps, request, model())

    assert caught.value.code is ControlCode.NOT_VERIFIED


def test_results_with_all_zero_routing_are_no_canary() -> None:
    """All-zero routing is no canary: an engine gives it if its kernels bypass the capture of routed experts."""
    request = canary_request(model())
    steps = steps_of(request)
    for step in steps:
        assert step.routed_experts is not None
        step.routed_experts = np.zeros_like(step.routed_experts)
    with pytest.raises(ControlError, match="all zero"):
        read_canary(steps, request, model())
