"""The commands on a vLLM engine. One `rollbus up` serves all tests of this module."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rollbus.frontend.cli.exits import CommandFailed
from rollbus.frontend.cli.generate.inputs import open_input
from rollbus.frontend.cli.generate.rows import Defaults, read_prompts
from rollbus.frontend.cli.local.fleet import TINY_MOE, make_tiny_moe
from rollbus.frontend.cli.tour import QUESTIONS, Tour
from rollbus.frontend.tokenization import TokenizerUnavailable, load_tokenizer
from tests.cli.support import ENV, ROOT, descendants_of, rollbus, running_up, serves
from tests.support.processes import becomes_true, is_alive
from tests.support.waits import Shared

pytestmark = pytest.mark.vllm


class Up(NamedTuple):
    """A running `rollbus up`."""

    process: subprocess.Popen[str]
    nats: str
    model: Path
    log: Path


@pytest.fixture(scope="module")
def ups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Up]]:
    """Start one fleet for all tests that leave it running."""
    with Shared(lambda: running(tmp_path_factory.mktemp("up")), is_sound=lambda up: serves(up.nats)) as shared:
        yield shared


@pytest.fixture
def up(ups: Shared[Up]) -> Up:
    """Return a fleet of one worker with the tiny MoE that `up` created."""
    return ups.get()


@contextmanager
def running(folder: Path) -> Iterator[Up]:
    """Run `up` with its state in this folder."""
    options = ("--state-dir", str(folder), "--weight-root", str(folder), "--weight-version", "1")
    with running_up(*options, log=folder / "log") as (process, info):
        assert info["workers"] == ["local-0"]
        yield Up(process, info["nats"], folder / TINY_MOE, folder / "log")


def test_status_shows_the_capabilities_of_the_engine(up: Up) -> None:
    """The worker serves the tiny MoE, and `status` shows the shape of its routed experts."""
    [worker] = json.loads(rollbus("status", "--json", nats=up.nats).stdout)["workers"]

    assert (worker["model"], worker["state"], worker["model_path"]) == (TINY_MOE, "serving", str(up.model))
    assert worker["capabilities"]["engine"] == "vllm"
    assert worker["capabilities"]["routed_experts"] == {"num_layers": 4, "top_k": 4, "num_experts": 16, "dtype": "u1"}
    assert worker["capabilities"]["weight_updates"]
    assert "4 of 16 in 4 layers, u1" in rollbus("status", nats=up.nats).stdout


def test_text_prompts_use_the_tokenizer_of_the_model(up: Up, tmp_path: Path) -> None:
    """The model's own tokenizer is found automatically, and the results equal those of the token ids."""
    output, by_ids = tmp_path / "text.jsonl", tmp_path / "ids.jsonl"
    options = ("--max-tokens", "8", "--temperature", "0")
    done = rollbus("generate", "--input", str(QUESTIONS), "--output", str(output), *options, nats=up.nats)
    assert (done.returncode, done.stderr) == (0, "")
    results = read(output)
    tokenizer = load_tokenizer(up.model)
    prompts = list(read_prompts(open_input(str(QUESTIONS)), Defaults()))
    assert sorted(results) == [prompt.index for prompt in prompts]
    with (tmp_path / "ids.in.jsonl").open("w") as file:
        for prompt in prompts:
            token_ids = tokenizer.encode(prompt.text or "")
            assert results[prompt.index]["prompt_len"] == len(token_ids)
            assert results[prompt.index]["text"] == tokenizer.decode(results[prompt.index]["token_ids"])
            file.write(json.dumps({"prompt_token_ids": token_ids}) + "\n")

    done = rollbus("generate", "--input", file.name, "--output", str(by_ids), *options, nats=up.nats)

    assert done.returncode == 0
    first = read(by_ids)[0]
    assert "text" not in first
    assert first["token_ids"] == results[0]["token_ids"]


def test_a_failed_prompt_does_not_affect_other_prompts(up: Up, tmp_path: Path) -> None:
    """A prompt that the tokenizer or engine rejects is one error line. Other prompts keep all samples and arrays."""
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[dict[str, object]] = [
        {"prompt": "Why?", "n": 2, "max_tokens": 5, "seed": 1, "ignore_eos": True},
        {"prompt": "Why?", "routed_experts_prompt_start": 1000},
        {"prompt_token_ids": [1] * 20_000},
        {"prompt": "Why?", "max_tokens": 1, "routed_experts_prompt_start": 1},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    args = ("--input", str(path), "--output", str(output), "--routed-experts", "npz")
    done = rollbus("generate", *args, nats=up.nats)

    assert done.returncode == 1
    results = read(output)
    assert [results[i]["error"]["field"] for i in (1, 2)] == ["routed_experts_prompt_start", "prompt_token_ids"]
    prompt_len = results[0]["prompt_len"]
    with np.load(output.with_suffix(".npz")) as arrays:
        assert arrays["0"].shape == arrays["0.1"].shape == (prompt_len + 4, 4, 4)
        assert arrays["3"].shape == (prompt_len - 1, 4, 4)
    assert results[0]["token_ids"] != results[0]["siblings"][0]["token_ids"]


def test_the_readme_runs(up: Up) -> None:
    """The Python code in README.md runs unchanged and prints the described output."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    done = subprocess.run(
        [sys.executable, "-c", code], env={**ENV, "ROLLBUS_NATS": up.nats}, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^\(\d+, 4, 4\) (length|stop)$", done.stdout, re.MULTILINE)


def test_the_demo_shows_experts_pause_new_weights_an_empty_cache_and_a_killed_worker(
    up: Up, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo shows an answer token by token with its experts, completes all questions, and has a row per layer.

    Requests wait while the fleet is paused, an answer continues with new weights, the flushed cache is empty, and the
    requests of a killed worker move to its next process and are whole. The new weights replace a tiny MoE of another
    release.
    """
    prompts = list(read_prompts(open_input(str(QUESTIONS)), Defaults(sampling={"max_tokens": 16})))
    tour = Tour(
        prompts=prompts, source=QUESTIONS, fleet="default", state_dir=up.model.parent, as_json=False, is_verbose=False
    )

    stale = up.model.with_name(f"{TINY_MOE}-1") / "tiny_moe.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    next_weights = asyncio.run(make_tiny_moe(up.model.parent, seed=1))
    assert (next_weights, stale.read_text() != "{}") == (stale.parent, True)

    asyncio.run(tour.show(up.nats, load_tokenizer(up.model), next_weights))

    out = capsys.readouterr().out
    assert len(re.findall(r"^ +\d+  ['\"].*['\"] +-\d+\.\d{3} ( +\d+){4}$", out, re.MULTILINE)) in range(1, 17)
    assert re.search(r"\d+ tokens in [\d.]+ s: \d+ tokens/s", out)
    assert f"All {len(prompts)} answers: " in out
    assert re.findall(r"^ +(\d) \|.{16}\| +\d+\.\d\d ", out, re.MULTILINE) == list("0123")
    assert f"{min(len(prompts), 8)} requests sent meanwhile: all of them wait in the queue" in out
    versions = re.findall(r"^ +\d+  ['\"].*['\"] +([12])$", out, re.MULTILINE)
    assert versions == sorted(versions)
    assert set(versions) == {"1", "2"}
    [cached] = re.findall(r"sent again: (\d+) tokens are in the cache", out)
    assert int(cached) > 0
    assert "sent after the flush: 0 tokens are in the cache" in out
    killed = re.search(
        r"kill -9 \d+: worker local-0 is dead, after \d+ tokens\n +(\d+) requests moved to its next", out
    )
    assert 1 <= int(killed[1]) <= 8
    num = min(len(prompts), 8)
    assert re.search(rf"all {num} answers are whole: \d+ tokens and .*; \d of {num} equal those of a run without", out)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    """A wrong --tokenizer is an error that names the folder."""
    with pytest.raises(TokenizerUnavailable, match="is not a folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(TokenizerUnavailable, match=f"no tokenizer in {tmp_path}"):
        load_tokenizer(tmp_path)


@pytest.mark.proves("P29")
def test_all_processes_exit_after_up_is_killed(up: Up) -> None:
    """After SIGKILL of `up`, the NATS server, the worker and the engine processes exit."""
    family = descendants_of(up.process.pid)
    assert len(family) >= 4  # nats-server and its guard, the worker, the engine core

    up.process.kill()

    for pid in family:
        assert becomes_true(partial(is_dead, pid))


async def test_a_folder_with_other_content_is_no_tiny_moe(tmp_path: Path) -> None:
    """A folder with other content stays and is named in the error."""
    other = tmp_path / TINY_MOE / "thesis.txt"
    other.parent.mkdir()
    other.write_text("mine")

    with pytest.raises(CommandFailed, match="is not the requested model"):
        await make_tiny_moe(tmp_path)

    assert other.read_text() == "mine"


def is_dead(pid: int) -> bool:
    """Return True if a process has ended."""
    return not is_alive(pid)


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Return the results of an output by index."""
    return {line["index"]: line for line in map(json.loads, path.read_text().splitlines())}
