"""The stages `updates`, `survival` and `speed` on synthetic workers: sound ones, and ones with faults."""

import argparse
import asyncio
import contextlib
import errno
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace as changed
from functools import partial
from http.client import IncompleteRead
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from msgspec.structs import replace

import rollbus
from rollbus.bus.publish.tensors import folder_tensors
from rollbus.frontend.cli.prove import evidence, probe, speed, updates
from rollbus.frontend.cli.prove.checkpoint import Copies, copy_checkpoint
from rollbus.frontend.cli.prove.probe import Difference, compare
from rollbus.frontend.cli.prove.speed import Speed
from rollbus.frontend.cli.prove.stage import StageRefused, failure
from rollbus.frontend.cli.prove.survival import Survival, _sleep
from rollbus.frontend.cli.prove.updates import Stream, Updates, judge_cut
from rollbus.schemas.errors import EngineDead
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.prove.stages_support import MODEL, StartFleet, answer, found, run_stages
from tests.support.checkpoints import MODEL as SHAPES
from tests.support.checkpoints import write_checkpoint, write_safetensors, write_sharded

SOUND = SyntheticConfig(step_s=0.001, max_model_len=2048, weight_deltas=False)
"""The synthetic weights depend on the names of the files of a checkpoint, which published versions do not keep."""
NOTHING = Difference(np.zeros(1), 1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make a checkpoint of one file."""
    return write_checkpoint(tmp_path / "models" / MODEL, fill=63)


def fleets(
    nats_url: str,
    fleet: str,
    root: Path,
    engines: list[SyntheticEngine],
    config: SyntheticConfig,
    kind: type[SyntheticEngine] = SyntheticEngine,
) -> StartFleet:
    """Return a function that runs synthetic workers in this process, and adds their engines to the list."""
    names = iter("abcdef")

    async def run(worker: Worker) -> None:
        with contextlib.suppress(EngineDead):
            await worker.run()

    @contextlib.asynccontextmanager
    async def start(model: Path, num_workers: int) -> AsyncIterator[tuple[str, str]]:
        name = f"{fleet}-{next(names)}"
        fields: dict[str, Any] = {"model_path": str(model), "weight_roots": (str(root),), "listen_s": 0.0}
        workers = []
        for number in range(num_workers):
            engines.append(kind(config, model))
            own = WorkerConfig(nats_url=nats_url, fleet=name, model=MODEL, worker_id=f"w{number}", **fields)
            workers.append(Worker(own, engines[-1]))
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(run(worker))
            async with rollbus.connect(nats_url, fleet=name) as rb:
                await rb.fleet.wait_for_workers(num_workers)
            yield nats_url, name
            for worker in workers:
                worker.stop()

    return start


# The copy of a checkpoint.


def test_a_changed_checkpoint_is_one_new_file_beside_hard_links(tmp_path: Path) -> None:
    """All files of the copies are hard links, but the changed one; the checkpoint itself stays as it was."""
    model = write_sharded(tmp_path / "model")
    names = list(SHAPES)
    for file, half in zip(sorted(model.glob("*.safetensors")), (names[:2], names[2:]), strict=True):
        write_safetensors(file, {name: SHAPES[name] for name in half}, fill=63)
    before = {name: bytes(tensor.data) for name, tensor in folder_tensors(model)}

    copies = copy_checkpoint(model, tmp_path)

    links = [file.name for file in copies.changed.iterdir() if file.stat().st_ino == (model / file.name).stat().st_ino]
    assert {file.name for file in copies.changed.iterdir()} - {*links} == {copies.file}
    assert {file.name for file in copies.original.iterdir()} == {file.name for file in model.iterdir()}
    assert {name: bytes(tensor.data) for name, tensor in folder_tensors(copies.original)} == before
    after = {name: bytes(tensor.data) for name, tensor in folder_tensors(copies.changed)}
    changed_names = {name for name in before if after[name] != before[name]}
    assert changed_names
    for name in changed_names:
        ratio = np.frombuffer(after[name], np.float32) / np.frombuffer(before[name], np.float32)
        assert ratio[::4].tolist() == [1.25] * len(ratio[::4])
        assert np.delete(ratio, np.s_[::4]).tolist() == [1.0] * (len(ratio) - len(ratio[::4]))


def test_bfloat16_is_scaled_and_other_dtypes_are_refused(tmp_path: Path) -> None:
    """A bfloat16 tensor is multiplied as numbers. A checkpoint without floats has nothing to change."""
    half = write_checkpoint(tmp_path / "half", {"w": (8,)}, dtype="BF16", fill=63)
    quantized = write_checkpoint(tmp_path / "quantized", {"w": (8,)}, dtype="I8", fill=63)

    (tmp_path / "out").mkdir()
    copies = copy_checkpoint(half, tmp_path / "out")

    [(_, tensor)] = folder_tensors(copies.changed)
    words = np.frombuffer(bytes(tensor.data), "<u2").astype("<u4") << 16
    assert words.view("<f4")[::4].tolist() == pytest.approx([0.74609375 * 1.25] * 2, rel=0.01)
    with pytest.raises(StageRefused, match="no safetensors file with tensors of BF16, F16, F32"):
        copy_checkpoint(quantized, tmp_path / "out")


def test_a_full_disk_is_no_fault_of_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that does not fit is not begun, and a disk that becomes full later is `not run`."""
    model = write_checkpoint(tmp_path / "model", fill=63)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(StageRefused, match=r"has 0 KiB free, and the changed copy of model.safetensors needs"):
        copy_checkpoint(model, tmp_path / "out")
    assert found(failure(OSError(errno.ENOSPC, "full")), "a disk is full")[0] == "not run"


# The comparison of two runs.

WHOLE = list(range(10, 40))


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "problem"),
    [
        (WHOLE, None, None),
        ([*WHOLE[:10], 99, *WHOLE[11:]], None, None),  # two tokens with the probability exp(-1): a tie
        ([*WHOLE[:10], WHOLE[9], *WHOLE[10:-1]], None, "token 10 was inserted and repeats the token before it"),
        ([*WHOLE[:10], *WHOLE[11:], 99], None, "token 10 was lost"),
        ([*WHOLE[:10], 99, *WHOLE[11:]], [-1.0] * 10 + [-2.0] * 20, "token 10 differs, and is no tie"),
        ([*WHOLE[:-1], 99], [-1.0] * 29 + [-0.01], "token 29 differs, and is no tie"),
        (WHOLE[:-1], None, "it has 29 tokens, not 30"),
    ],
)
def test_a_different_token_is_a_tie_or_is_named(
    token_ids: Sequence[int], logprobs: Sequence[float] | None, problem: str | None
) -> None:
    """A repeated, a lost and an unlikely token are named, and two tied tokens are no problem."""
    difference = compare([answer(WHOLE)], [answer(token_ids, logprobs)], "float32")

    assert [text.removeprefix("request 0: ").split(":")[0] for text in difference.problems] == [problem] * bool(problem)
    finding = difference.finding("after it", "float32", NOTHING, ("a cause",))
    assert (finding.verdict, finding.causes) == (("wrong", ("a cause",)) if problem else ("ok", ()))


def test_two_equally_likely_tokens_cannot_both_be_certain() -> None:
    """Two different tokens that each have a probability near 1 are no tie, although their log probabilities agree."""
    certain = [-0.01] * 30

    [problem] = compare([answer(WHOLE, certain)], [answer([*WHOLE[:-1], 99], certain)], "float32").problems

    assert "is no tie: the logprobs are -0.01 and -0.01" in problem


def test_logprobs_and_experts_have_limits_with_the_floor() -> None:
    """Differences above the limits are `look` or `wrong`; a larger floor of the engine raises the limits."""
    rows = np.zeros((31, 2, 2), np.uint8)
    other = rows.copy()
    other[:2] = 1
    expected = answer(WHOLE, rows=rows)

    far = compare([expected], [answer(WHOLE, [-1.002] * 30, rows)], "float32")
    experts = compare([expected], [answer(WHOLE, rows=other)], "float32")
    missing = compare([expected], [answer(WHOLE)], "float32")

    assert far.finding("x", "float32", NOTHING).verdict == "wrong"
    assert far.finding("x", "float32", changed(NOTHING, logprobs=np.array([0.001]))).verdict == "ok"
    assert far.finding("x", "bfloat16", NOTHING).verdict == "ok"
    assert experts.finding("x", "float32", NOTHING).verdict == "wrong"
    assert experts.finding("x", "float32", changed(NOTHING, other_choices=0.04)).verdict == "ok"
    assert missing.problems == ("request 0: only one of the two runs has routed experts",)


# Updates.


async def test_updates_of_sound_workers_are_ok(nats_url: str, fleet: str, model: Path) -> None:
    """A path with changed weights and the way back answer as fresh workers; skipped ways have a reason."""
    start = fleets(nats_url, fleet, model.parent, [], SOUND)

    [outcome] = await run_stages([Updates()], start, model, model.parent)

    assert found(outcome, "by path: ")[0] == "ok"
    assert found(outcome, "by path, and back: ")[0] == "ok"
    assert found(outcome, "by delta: ") == ("not run", "by delta: the workers take no published deltas")
    assert found(outcome, "by the transfer engine: ")[0] == "not run"
    numbers = [number.name for finding in outcome.findings for number in finding.numbers]
    assert {f"by path, {name}" for name in ("staged", "paused", "verified")} <= {*numbers}


async def test_a_worker_that_acknowledges_and_keeps_the_old_weights_is_found(
    nats_url: str, fleet: str, model: Path
) -> None:
    """An update that changes nothing passes a worker's own canary. The stage names it."""
    engines: list[SyntheticEngine] = []
    start = fleets(nats_url, fleet, model.parent, engines, SOUND)

    def keep_weights() -> None:
        async def load_nothing(path: Path) -> None:
            engines[0]._replace(engines[0]._weights)

        engines[0].load_weights = load_nothing  # type: ignore[method-assign]

    [outcome] = await run_stages([Updates()], start, model, model.parent, meanwhile=keep_weights)

    verdict, text = found(outcome, "by path: ")
    assert verdict == "wrong"
    assert text.endswith("the answers did not change")
    [finding] = [finding for finding in outcome.findings if finding.what == text]
    assert finding.causes[0].startswith("weights that did not load")


async def test_a_cut_with_wrong_versions_is_found(nats_url: str, fleet: str, model: Path) -> None:
    """An old version after a new one is wrong, and so are tokens of the new version with the old log probabilities."""
    request = GenerateRequest(prompt_token_ids=[1, 2])

    class Proof:
        dtype = "float32"

        class rb:  # noqa: N801 - stands for a client
            @staticmethod
            async def complete_many(requests: Sequence[GenerateRequest], **_: Any) -> AsyncIterator[Any]:
                for one in requests:
                    length = len(one.prompt_token_ids) - 1
                    yield changed(answer([5]), request_id=one.request_id, prompt_logprobs=np.full(length, -1.0, "f4"))

    def stream(logprobs: Sequence[float], versions: Sequence[int]) -> Stream:
        return Stream(request, list(range(len(versions))), list(logprobs), list(versions))

    proof: Any = Proof()
    sound = await judge_cut(proof, [stream([-1.0] * 8 + [-3.0] * 8, [1] * 8 + [2] * 8)], 2)
    turned = await judge_cut(proof, [stream([-1.0] * 8 + [-3.0] * 8, [1, 2] * 8)], 2)
    kept = await judge_cut(proof, [stream([-1.0] * 16, [1] * 8 + [2] * 8)], 2)
    late = await judge_cut(proof, [stream([-1.0] * 4 + [-3.0] * 12, [1] * 8 + [2] * 8)], 2)

    assert [finding.verdict for finding in (sound, turned, kept, late)] == ["ok", "wrong", "wrong", "wrong"]
    assert (await judge_cut(proof, [], 2)).verdict == "look"


async def test_a_fleet_in_use_gets_its_state_back_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that ends early, here by an error after the first step, leaves the original weights and no sleep."""
    steps: list[str] = []

    class Publisher:
        def __init__(self, *_: Any, **_options: Any) -> None:
            pass

        async def __aenter__(self) -> "Publisher":
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def publish(self, tensors: Path, *, version: int, update: bool = True) -> Any:
            steps.append(f"{tensors.name} {version}{' loaded' if update else ''}")
            return SimpleNamespace(ledger=None, is_anchor=False)

    async def note(name: str) -> None:
        steps.append(name)
        if name == "sleep":
            raise EngineDead("too early")

    fail = partial(note, "sleep")
    commands = SimpleNamespace(sleep=lambda *_, **_options: fail(), wake=lambda **_: note("wake"), workers=[])
    engine = SimpleNamespace(weight_deltas=True, sleep=True)
    proof: Any = SimpleNamespace(model="m", rb=SimpleNamespace(fleet=commands), fleet=SimpleNamespace(engine=engine))
    stage, copies = Updates(), Copies(tmp_path / "original", tmp_path / "changed", "file", 0)
    monkeypatch.setattr(updates, "WeightPublisher", Publisher)
    monkeypatch.setattr(updates, "folder_tensors", lambda folder: folder)
    monkeypatch.setattr(updates, "next_version", lambda _: 1)
    monkeypatch.setattr(stage, "_record", lambda *_: fail())
    nothing: Any = None

    with pytest.raises(EngineDead):
        await stage._by_delta(proof, nothing, copies)
    with pytest.raises(EngineDead):
        await _sleep(proof, nothing)

    assert steps == ["original 1", "changed 2 loaded", "sleep", "original 3 loaded", "sleep", "wake"]


# Survival.


class Repeating(SyntheticEngine):
    """An engine that generates the last token of a resumed request once more."""

    async def add(self, key: str, request: GenerateRequest, kv: Any = None) -> None:
        """Add the request, without its last token if it is a resumed one."""
        if request.prompt_len > 20 and request.prompt_len not in {16 << number for number in range(5)}:
            request = replace(request, prompt_token_ids=request.prompt_token_ids[:-1])
        await super().add(key, request, kv)


@pytest.mark.parametrize("repeats", [False, True])
async def test_a_resumed_stream_that_repeats_a_token_is_found(
    nats_url: str, fleet: str, model: Path, monkeypatch: pytest.MonkeyPatch, repeats: bool
) -> None:
    """A worker dies in mid-stream: the answers are equal, unless the next worker repeats a token."""
    engines: list[SyntheticEngine] = []
    config = replace(SOUND, num_experts=0, step_s=0.003)
    kind = Repeating if repeats else SyntheticEngine
    start = fleets(nats_url, fleet, model.parent, engines, config, kind)
    monkeypatch.setattr(probe, "os", SimpleNamespace(kill=lambda *_: engines[0].kill()))

    [outcome] = await run_stages([Survival()], start, model, model.parent, num_workers=2)

    verdict, text = found(outcome, "kill -9 in mid-stream")
    assert verdict == ("wrong" if repeats else "ok"), text
    assert ("was inserted and repeats the token before it" in text) is repeats


# Speed.


async def test_the_fleet_is_compared_with_its_engine_and_with_a_server(
    nats_url: str, fleet: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way is measured with the same requests, after the fleet has stopped; a slow fleet is `look`."""
    asked: dict[str, list[int]] = {}

    def way(name: str, delay_s: float) -> Any:
        @contextlib.asynccontextmanager
        async def start(_model: str, engine_args: dict[str, Any]) -> AsyncIterator[Any]:
            assert engine_args["logprobs_mode"] == "raw_logprobs"

            async def run(prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
                asked.setdefault(name, []).append(len({tuple(prompt) for prompt in prompts}))
                await asyncio.sleep(delay_s)
                return len(prompts) * max_tokens

            yield run

        return start

    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "engine_alone", way("engine", 0.001))
    monkeypatch.setattr(speed, "server_alone", way("server", 1.0))
    monkeypatch.setattr(Speed, "_is_comparable", lambda *_: True)
    config = replace(SOUND, max_num_seqs=4, max_model_len=64)

    [outcome] = await run_stages([Speed()], fleets(nats_url, fleet, model.parent, [], config), model, model.parent)

    assert found(outcome, "fleet: ")[0] == "ok"
    assert found(outcome, "engine: ")[0] == "look"
    assert found(outcome, "server: ")[0] == "ok"
    assert asked == {"engine": [4] * 4, "server": [4] * 4}
    assert set(outcome.details["tokens_per_s"]) == {"fleet", "engine", "server"}


async def test_a_server_that_answers_in_another_way_does_not_cost_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut answer or one of another shape is `not run`: the command goes on."""

    def way(error: Exception) -> Any:
        @contextlib.asynccontextmanager
        async def start(_model: str, _engine_args: dict[str, Any]) -> AsyncIterator[Any]:
            yield AsyncMock(side_effect=error)

        return start

    monkeypatch.setattr(speed, "engine_alone", way(KeyError("choices")))
    monkeypatch.setattr(speed, "server_alone", way(IncompleteRead(b"")))
    monkeypatch.setattr(Speed, "_is_comparable", lambda *_: True)
    engine = SimpleNamespace(max_num_seqs=4, max_model_len=64, vocab_size=100)
    fields = {"fleet": SimpleNamespace(engine=engine), "args": SimpleNamespace(engine_args=None)}
    proof: Any = SimpleNamespace(is_own=True, folder=None, seconds_left=lambda: 1.0, **fields)
    stage = Speed()
    stage._rates["fleet"] = [1.0]

    outcome = await stage.conclude(proof)

    assert outcome is not None
    assert [finding.verdict for finding in outcome.findings] == ["not run", "not run"]


async def test_a_process_with_open_requests_is_killed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is cancelled does not wait until vLLM has answered."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True)"
    endless = f"{program}; time.sleep(3600)"
    monkeypatch.setattr(speed, "python_module", lambda *_: [sys.executable, "-c", endless])
    monkeypatch.setattr(speed, "STOP_S", 3600.0)
    limit = asyncio.timeout(None)
    with contextlib.suppress(TimeoutError):
        async with limit, speed.engine_alone("model", {}) as run:
            limit.reschedule(0.0)
            await run([[1]], 1)
    assert limit.expired()


async def test_a_reference_that_is_late_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are judged by the engine's second pass if the reference does not end in its time."""
    monkeypatch.setattr(evidence, "run_reference", lambda *_: asyncio.sleep(3600))
    fields = {"folder": tmp_path, "scratch": tmp_path, "evidence": {"answers": evidence.Evidence(sampled=[])}}
    fleet = SimpleNamespace(engine=SimpleNamespace(dtype="float32"))
    args = argparse.Namespace(reference="hf", dtype=None)
    proof: Any = SimpleNamespace(args=args, fleet=fleet, seconds_left=lambda: 0.01, **fields)

    found = await evidence.add_reference(proof)

    assert "--minutes" in str(found.reference_refusal)
