"""A client records what it returns: each sample once, with bounded memory, also if the process or the disk fails."""

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import rollbus
from rollbus import BusClosed, GroupPrompt, InvalidRequest, RunRecorder, SamplingParams, read_record
from rollbus.bus.client import record_writer as writer
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.bus.record.test_rows import assert_equal, generation
from tests.support.fleet import StartServed
from tests.support.processes import becomes_true
from tests.support.requests import all_of, greedy
from tests.support.waits import SOON_S

SAMPLED = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, n=2)
KILLED = """
import sys, threading, rollbus
from rollbus.bus.client import record_writer as writer
from tests.bus.record.test_rows import generation
writer.FLUSH_S = 0.01
recorder = rollbus.RunRecorder(sys.argv[1])
for number in range(1000):
    recorder.add(generation(number))
    recorder.score(generation(number), reward=number)
    threading.Event().wait(0.01)
"""


async def test_results_are_recorded_as_returned(one_worker: StartServed, tmp_path: Path) -> None:
    """The results of `complete` and `complete_many` come back equal from the record, with times, lag and experts."""
    requests = [greedy(10 + i, 4 + i) for i in range(5)]
    async with one_worker() as (rb, *_):
        rb.record(tmp_path, experts=True)
        both = await rb.complete(rollbus.GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=SAMPLED))
        returned = [both, *[generation async for generation in rb.complete_many(requests)]]
    record = read_record(tmp_path)
    found = list(record)
    assert len(found) == len(returned) == 6
    assert record.num_samples == 7
    for one, other in zip(found, returned, strict=True):
        assert_equal(one, other)
        assert one.opened_at <= one.ended_at
    assert len({sample.key for each in returned for sample in (each, *each.siblings)}) == 7
    np.testing.assert_array_equal(record.column("lag"), 0)
    assert record.problems == []


async def test_nothing_is_recorded_before_and_after(one_worker: StartServed, tmp_path: Path) -> None:
    """Only results between `record` and `close` have a row. Then another record may begin; two at a time may not."""
    async with one_worker() as (rb, *_):
        await rb.complete(greedy(1, 3))
        recorder = rb.record(tmp_path)
        result = await rb.complete(greedy(2, 3))
        with pytest.raises(InvalidRequest, match="this client records into"):
            rb.record(tmp_path)
        recorder.close()
        await rb.complete(greedy(3, 3))
        rb.record(tmp_path / "second")
        await rb.complete(greedy(4, 3))
    assert [each.key for each in read_record(tmp_path)] == [result.key]
    assert len(list(read_record(tmp_path / "second"))) == 1
    with pytest.raises(BusClosed, match="is closed"):
        recorder.score(result, reward=1.0)


async def test_groups_are_recorded_with_their_outcome(one_worker: StartServed, tmp_path: Path) -> None:
    """Each answer of a returned group has one row, also if it was stopped and continued."""
    prompts = [GroupPrompt(greedy(10 + i, length), key=i) for i, length in enumerate([5, 700, 3, 4])]
    async with one_worker(config=SyntheticConfig(step_s=0.001, max_model_len=10_000)) as (rb, *_):
        with RunRecorder(tmp_path) as recorder:
            async with rb.groups(prompts, n=2, need=1, over=2, record=recorder) as groups:
                steps = await all_of(groups)
            answers = [answer for step in steps for group in step.groups for answer in group.generations]
            recorder.score(answers[0], reward=1.0)
    record = read_record(tmp_path)
    assert len(answers) == record.num_samples == 8
    for one, other in zip(record, answers, strict=True):
        assert_equal(one, other, without=("routed_experts", "request"))
    assert max(answer.parts for answer in answers) > 1
    assert record.score_of(answers[0]).reward == 1.0
    np.testing.assert_array_equal(record.column("num_tokens"), [len(answer.token_ids) for answer in answers])


def test_the_client_without_asyncio_records(one_worker: StartServed, tmp_path: Path) -> None:
    """`rollbus.sync` records too."""

    async def run() -> None:
        async with one_worker() as (rb, *_):
            config = rb._config
            await asyncio.to_thread(use, config.server.urls[0], config.subjects.fleet)

    def use(url: str, fleet: str) -> None:
        with rollbus.sync.connect(url, fleet=fleet) as rb:
            recorder = rb.record(tmp_path)
            for result in rb.complete_many([greedy(1, 3), greedy(2, 3)]):
                recorder.score(result, reward=1.0)

    asyncio.run(run())
    np.testing.assert_array_equal(read_record(tmp_path).column("reward"), [1.0, 1.0])


def written(folder: Path, kind: str) -> int:
    """Return the bytes of the open part of a kind."""
    return sum(path.stat().st_size for path in folder.glob(f"{kind}-*.arrow"))


def test_a_killed_process_leaves_a_readable_record(tmp_path: Path) -> None:
    """After SIGKILL, the record has all flushed samples with their scores; a second process adds its own parts."""
    program = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    try:
        assert becomes_true(lambda: min(written(tmp_path, "samples"), written(tmp_path, "scores")) > 10_000)
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
    with RunRecorder(tmp_path) as recorder:
        recorder.add(generation(5000))
    record = read_record(tmp_path)
    numbers = sorted(each.key.number for each in record if each.key is not None)
    assert numbers == [*range(len(numbers) - 1), 5000]
    assert len(numbers) > 2
    scores = {each.key.number: record.score_of(each).reward for each in record if each.key is not None}
    scored = {number: reward for number, reward in scores.items() if reward is not None}
    assert scored
    assert all(number == reward for number, reward in scored.items())
    assert any("was killed" in problem for problem in record.problems)


async def test_a_slow_disk_makes_the_caller_wait(
    one_worker: StartServed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk takes nothing, results wait: memory holds the bound and one result, and nothing is lost."""
    resume = asyncio.Event()
    loop = asyncio.get_running_loop()
    write = writer._Parts.write

    def slow(self: "writer._Parts", rows: writer.Rows) -> None:
        asyncio.run_coroutine_threadsafe(resume.wait(), loop).result()
        write(self, rows)

    monkeypatch.setattr(writer._Parts, "write", slow)
    async with one_worker() as (rb, *_), asyncio.TaskGroup() as tasks:
        recorder = rb.record(tmp_path, max_buffered_bytes=3000)
        results: list[rollbus.Generation] = []

        async def read() -> None:
            async for result in rb.complete_many([greedy(i, 3) for i in range(20)]):
                results.append(result)  # noqa: PERF401 - counted while the loop runs

        reading = tasks.create_task(read())
        try:
            async with asyncio.timeout(SOON_S):
                while recorder._num_bytes <= 3000:
                    await rb.fleet.state()
            held = len(results)
            await rb.fleet.state()
            assert len(results) == held < 20
            assert not reading.done()
            assert recorder._num_bytes < 3000 + 1500
        finally:
            resume.set()
    assert len(results) == 20
    assert len(list(read_record(tmp_path))) == 20


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file of this process grow above a size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_ends_the_record_and_not_the_run(
    one_worker: StartServed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the disk gives one warning and a mark in the folder. The client returns all results."""
    async with one_worker() as (rb, *_):
        with full_disk(20_000):
            recorder = rb.record(tmp_path, max_buffered_bytes=1000)
            results = [result async for result in rb.complete_many([greedy(i, 50) for i in range(200)])]
            async with asyncio.timeout(SOON_S):
                while recorder.error is None:
                    recorder.score(results[0], reward=1.0)
                    await rb.fleet.state()
        assert not any(result.error for result in results)
        recorder.score(results[0], reward=1.0)
    assert isinstance(recorder.error, OSError)
    warnings = [record for record in caplog.records if record.getMessage().startswith("record.failed")]
    assert len(warnings) == 1
    record = read_record(tmp_path)
    assert any("the record failed and lost" in problem for problem in record.problems)
    assert 0 < len(list(record)) < 200
