"""The examples run as a user runs them: copied into a folder with unrelated modules, on one `rollbus up`."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rollbus
from tests.cli.support import running_up, serves
from tests.support.processes import FOLDERS, ROOT, becomes_true
from tests.support.waits import Shared, in_trainers_run, patient

pytestmark = pytest.mark.vllm

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLBUS_"))}


class Place(NamedTuple):
    """A folder with the examples, and a fleet of one real worker with the tiny MoE."""

    folder: Path
    nats: str
    http: str

    def start(self, name: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start an example."""
        command = [sys.executable, f"{name}.py", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)

    def run(self, name: str, *arguments: str) -> str:
        """Run an example to its end; return its output."""
        with self.start(name, *arguments) as program:
            try:
                said, complained = program.communicate(timeout=patient(540.0))
            finally:
                program.kill()
        assert program.returncode == 0, said + complained
        return said

    def version(self) -> int:
        """Return the version of the worker's weights."""

        async def ask() -> int:
            async with rollbus.connect(self.nats) as rb:
                [worker] = (await rb.fleet.state()).workers
                return worker.weight_version

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Place]]:
    """Provide one place for all tests, which is replaced if its worker no longer serves."""
    with Shared(
        lambda: running_place(tmp_path_factory.mktemp("place")), is_sound=lambda place: serves(place.nats)
    ) as shared:
        yield shared


@pytest.fixture
def place(places: Shared[Place]) -> Place:
    """Return the place in which the examples run."""
    return places.get()


@contextmanager
def running_place(folder: Path) -> Iterator[Place]:
    """Copy the examples beside modules that have names of rollbus packages, and start the fleet."""
    state = folder / "state"
    state.mkdir()
    here = folder / "here"
    here.mkdir()
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, here)
    for name in FOLDERS:
        (here / f"{name}.py").write_text(f"raise SystemExit('{name}.py is not a part of rollbus')\n")
    options = ("--http", "127.0.0.1:0", "--state-dir", str(state), "--cache-dir", str(folder / "cache"))
    with running_up(*options, log=state / "log") as (_, info):
        yield Place(here, info["nats"], info["http"])


@in_trainers_run
def test_grpo_raises_the_reward(place: Place) -> None:
    """Each step publishes a new version to the fleet, and the mean reward rises."""
    before = place.version()
    said = place.run("grpo", "--nats", place.nats, "--steps", "8", "--record", "run", "--tensorboard", "logs")

    steps = re.findall(r"step (\d+): mean reward of (\d+) answers (\S+); weights are now (\d+)\n", said)
    assert [int(step) for step, *_ in steps] == [*range(1, 9)]
    assert {int(answers) for _, answers, *_ in steps} == {64}
    assert [int(version) for *_, version in steps] == [*range(before + 2, before + 10)]
    assert place.version() == before + 9
    rewards = [float(reward) for _, _, reward, _ in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3])

    events = EventAccumulator(str(place.folder / "logs"))
    events.Reload()
    logged = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    np.testing.assert_allclose(logged["reward/mean"], rewards, atol=0.001)
    assert {len(values) for values in logged.values()} == {8}
    assert {"staleness/mean", "length/truncated", "tokens_per_s", "wait_s", "pause_s"} < logged.keys()
    record = rollbus.read_record(place.folder / "run")
    assert record.problems == []
    assert record.num_samples >= 8 * 64
    np.testing.assert_allclose(np.nanmean(record.column("reward")), np.mean(rewards), atol=0.001)


@in_trainers_run
def test_a_coding_agent_learns_in_groups_of_sessions(place: Place) -> None:
    """Each step publishes a version, sampler and trainer agree under the grammar, and the mean reward rises."""
    before = place.version()
    said = place.run("coding_agent", "--nats", place.nats, "--http", place.http, "--steps", "4")

    line = r"step (\d+): mean reward of 32 sessions (\S+), (\S+) turns, KL (\S+); weights are now (\d+)\n"
    steps = re.findall(line, said)
    assert [int(step) for step, *_ in steps] == [*range(1, 5)]
    assert [int(version) for *_, version in steps] == [*range(before + 2, before + 6)]
    assert place.version() == before + 5
    rewards = [float(reward) for _, reward, *_ in steps]
    assert sum(rewards[-2:]) > sum(rewards[:2])
    assert all(1 <= float(turns) <= 4 for _, _, turns, *_ in steps)
    # Without the grammar or the sampler's experts in the trainer, it is above 0.1.
    assert max(float(divergence) for *_, divergence, _ in steps) < 0.01


def test_the_agent_calls_its_tool_and_has_a_sample_for_each_conversation(place: Place) -> None:
    """Each conversation has two tool calls, an answer, cached prompt tokens from turn 2 on, and all its rows."""
    said = place.run("multi_turn_agent", "--nats", place.nats, "--steps", "2")

    turns = re.findall(r"(\w{4}) turn (\d), (\d+) of (\d+) prompt tokens cached: (.*)", said)
    conversations = {name: [turn for turn in turns if turn[0] == name] for name, *_ in turns}
    assert len(conversations) == 8
    for conversation in conversations.values():
        assert [turn for _, turn, *_ in conversation] == ["1", "2", "3"]
        assert all(re.fullmatch(r"'add\(\d+, \d+\)'", text) for *_, text in conversation[:2])
        assert all(0 < int(cached) < int(length) for _, _, cached, length, _ in conversation[1:])
    batches = re.findall(r"a batch: (\d+) tokens to train, experts \(1, (\d+), 4, 4\)", said)
    assert len(batches) == 2
    for (trained, positions), start in zip(batches, (0, 12), strict=True):
        prompts = sum(int(length) for _, turn, _, length, _ in turns[start : start + 12] if turn == "3")
        # A batch has one position per prediction: all tokens but the last of each conversation.
        assert prompts < int(positions) < prompts + int(trained)


def test_a_killed_evaluation_is_continued(place: Place) -> None:
    """After SIGKILL and a partial last line in the file, the next run evaluates each of the remaining tasks once."""
    tasks = [{"id": f"t{i}", "prompt": f"Task {i}: write an e.", "expected": "e"} for i in range(80)]
    (place.folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    results = place.folder / "results.jsonl"
    with place.start("evaluate", "--nats", place.nats) as program:
        try:
            assert becomes_true(lambda: results.exists() and results.read_text().count("\n") > 2)
        finally:
            program.send_signal(signal.SIGKILL)
    done = results.read_text().splitlines()
    assert len(done) < len(tasks)
    with results.open("a") as file:
        file.write('{"id": "t')

    said = place.run("evaluate", "--nats", place.nats)

    assert f"{len(done)} done before, {len(tasks) - len(done)} to do\n" in said
    lines = results.read_text().splitlines()
    assert lines[: len(done)] == done
    found = [json.loads(line) for line in lines]
    assert sorted(result["id"] for result in found) == sorted(str(task["id"]) for task in tasks)
    scores = [float(score) for score in re.findall(r"pass@\d of 80 tasks: (\S+)", said)]
    assert scores == sorted(scores)
    assert scores[0] == pytest.approx(sum(result["num_passed"] / 8 for result in found) / 80, abs=1e-3)


def test_an_evaluation_without_a_task_file_creates_the_file(place: Place) -> None:
    """Without a task file, the evaluation creates one."""
    said = place.run(
        "evaluate", "--nats", place.nats, "--tasks", "made.jsonl", "--results", "of-made.jsonl", "--steps", "2"
    )

    assert len((place.folder / "made.jsonl").read_text().splitlines()) == 20
    assert "pass@8 of 2 tasks: " in said


def test_the_http_example_returns_tokens_and_experts(place: Place) -> None:
    """The HTTP example runs a chat and two turns in token ids with contiguous rows."""
    said = place.run("http_openai", "--http", place.http, "--steps", "2")

    assert said.startswith("chat, streamed: ")
    rows = re.findall(r"routed experts of positions (\d+) to (\d+): \((\d+), 4, 4\)", said)
    prompts = re.findall(r"turn \d: (\d+) prompt tokens, (\d+) tokens sampled by weights \[\d+\]", said)
    assert len(rows) == len(prompts) == 2
    ends = [int(prompt) + int(sampled) - 1 for prompt, sampled in prompts]
    assert [(int(first), int(last) + 1) for first, last, _ in rows] == [(0, ends[0]), (ends[0], ends[1])]


def test_new_weights_are_deltas_and_reach_the_fleet(place: Place) -> None:
    """The first version is complete and later ones are small; each token has the old or the new version."""
    before = place.version()
    said = place.run("publish_weights", "--nats", place.nats, "--steps", "2")

    shares = [float(share) for share in re.findall(r"\((\S+)% of the model\), loaded by local-0", said)]
    assert len(shares) == 3
    assert shares[0] > 90
    assert max(shares[1:]) < 10
    for number, parts in enumerate(re.findall(r"a request that was in flight: (.*)", said), before):
        spans = re.findall(r"(\d+) tokens by weights (\d+)", parts)
        assert sum(int(tokens) for tokens, _ in spans) == 400
        assert {int(version) for _, version in spans} <= {number, number + 1}
    assert place.version() == before + 3
