"""`rollbus generate` with data as it is, on a fleet with a synthetic engine."""

import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyarrow import parquet

from rollbus.frontend.cli.app import main
from rollbus.frontend.cli.exits import ExitCode
from rollbus.frontend.cli.generate.inputs import Input
from rollbus.frontend.cli.generate.rows import Defaults, InputSummary
from rollbus.frontend.cli.generate.run import GenerateRun, wait_reason
from rollbus.frontend.tokenization import load_tokenizer
from rollbus.schemas.presence import WorkerState
from tests.cli.support import ENV, command, rollbus, running_up, serves
from tests.http.support import make_byte_level, save
from tests.support.presences import presence
from tests.support.shared import Shared

USER = {"role": "user", "content": "the"}


@pytest.fixture(scope="module")
def ups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[tuple[Any, dict[str, Any]]]]:
    """Start a fleet that all tests of this module share."""
    log = tmp_path_factory.mktemp("up") / "log"

    def make() -> AbstractContextManager[tuple[Any, dict[str, Any]]]:
        return running_up("--engine", "synthetic", log=log)

    with Shared(make, is_sound=lambda up: serves(up[1]["nats"], 1)) as shared:
        yield shared


@pytest.fixture
def nats(ups: Shared[tuple[Any, dict[str, Any]]]) -> str:
    """Return the NATS address of the shared fleet."""
    return str(ups.get()[1]["nats"])


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Return the directory of a tokenizer."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    return str(save(make_byte_level(), folder))


def write(path: Path, *rows: dict[str, Any]) -> str:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def generate(nats: str, source: str, output: Path, *args: str, code: int = 0) -> str:
    """Run the command. Check its exit code and return its stderr."""
    done = rollbus("generate", "--input", source, "--output", str(output), "--max-tokens", "2", *args, nats=nats)
    assert done.returncode == code, done.stderr
    return done.stderr


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results in the order of the input."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: int(line["index"]))


@pytest.mark.slow
def test_rows_of_data_give_results_with_the_row(nats: str, tmp_path: Path, tokenizer: str) -> None:
    """Results have row, id, model and on request the prompt. Ids may repeat, with one warning."""
    rows: list[dict[str, Any]] = [
        {"question": "the the", "answer": "4", "request_id": ["x", 1]},
        {"question": "the", "request_id": "a"},
    ]
    output = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", *rows, rows[1])
    stderr = generate(nats, source, output, "--prompt-field", "question", "--with-prompt", "--tokenizer", tokenizer)

    first, second, third = read(output)
    assert stderr == "1 rows repeat a request_id; the field index of a result is unique\n"
    assert (first["row"], first["request_id"], first["model"]) == (rows[0], ["x", 1], "synthetic")
    assert (first["prompt"], len(first["prompt_token_ids"]), len(first["token_ids"])) == ("the the", 2, 2)
    assert (second["request_id"], third["request_id"]) == ("a", "a")
    assert "row" not in second


@pytest.mark.slow
def test_messages_become_tokens_with_the_chat_template(nats: str, tmp_path: Path, tokenizer: str) -> None:
    """Messages are rendered by the template of the tokenizer, and their special tokens are not added twice."""
    output = tmp_path / "out.parquet"
    row = {"messages": [USER, {"role": "assistant", "content": "th"}], "id": 1}
    source = write(tmp_path / "in.jsonl", row)
    assert "line 1: messages end with the assistant" in generate(nats, source, output, code=ExitCode.USAGE)
    args = ("--messages", "continue", "--with-prompt", "--tokenizer", tokenizer)
    generate(nats, source, output, *args)

    [result] = parquet.read_table(output).to_pylist()
    assert (json.loads(result["prompt"]), json.loads(result["row"])) == (row["messages"], row)
    expected = load_tokenizer(Path(tokenizer)).encode("<user>the<|end|><assistant>th", add_special_tokens=False)
    assert (result["prompt_token_ids"], result["prompt_len"]) == (expected, len(expected))
    generate(nats, source, output, *args)
    assert parquet.read_table(output).num_rows == 1


@pytest.mark.slow
def test_a_changed_option_is_named(nats: str, tmp_path: Path) -> None:
    """A later run with another option names it with its first value, and one with other rows names the row."""
    source, output = write(tmp_path / "in.jsonl", {"prompt_token_ids": [1], "x": 1}), tmp_path / "out.jsonl"
    generate(nats, source, output)
    before = output.read_bytes()

    changed = generate(nats, source, output, "--max-tokens", "40", "--seed", "3", code=ExitCode.USAGE)
    assert "the options changed: --max-tokens 40, first run 2, --seed 3, first run without; choose an" in changed
    write(tmp_path / "in.jsonl", {"prompt_token_ids": [1], "x": 2})
    assert "line 1 differs from the row of its result: the input changed" in generate(
        nats, source, output, code=ExitCode.USAGE
    )
    assert output.read_bytes() == before


@pytest.mark.slow
def test_an_unknown_model_is_found_before_the_first_request(nats: str, tmp_path: Path) -> None:
    """A model that nobody serves is a usage error with its place, the nearest name and all names."""
    output = tmp_path / "out.jsonl"
    rows: list[dict[str, Any]] = [{"prompt_token_ids": [1]}, {"prompt_token_ids": [1], "model": "sintetic"}]
    source = write(tmp_path / "in.jsonl", *rows)

    error = generate(nats, source, output, code=ExitCode.USAGE)
    assert error == f"rollbus: {source} line 2: model sintetic (did you mean synthetic?); allowed: synthetic\n"
    error = generate(nats, source, output, "--model", "nope", code=ExitCode.USAGE)
    assert "--model nope; allowed: synthetic" in error
    assert output.read_bytes() == b""


@pytest.mark.slow
def test_a_stream_is_read_once_and_continued(nats: str, tmp_path: Path) -> None:
    """Stdin is read as it comes. A wrong row after the checked ones is the error of its prompt."""
    output = tmp_path / "out.jsonl"
    lines = ['{"prompt_token_ids": [1]}\n'] * 1001 + ['{"prompt_token_ids": []}\n', '{"prompt_token_ids": [2]}\n']
    args = ("generate", "--input", "-", "--output", str(output), "--max-tokens", "1", "--json")

    def run(lines: list[str]) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            command(*args),
            env={**ENV, "ROLLBUS_NATS": nats},
            input="".join(lines),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, json.loads(done.stdout)

    code, report = run(lines)
    assert (code, report["prompts"], report["done"], report["failed"]) == (1, 1003, 1002, 1)
    assert report["first_error"].startswith("line 1002: prompt_token_ids has 0 entries")
    code, report = run([*lines[:1001], lines[2]])
    assert (code, report["done"], report["resumed"]) == (0, 1, 1002)


@pytest.mark.slow
def test_a_model_without_a_chat_template_is_found_first(nats: str, tmp_path: Path) -> None:
    """Messages for a tokenizer without a chat template fail before the first request."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    save(make_byte_level(), folder, chat_template=None)
    source = write(tmp_path / "in.jsonl", {"prompt_token_ids": [1]}, {"messages": [USER]})
    output = tmp_path / "out.jsonl"

    assert "has no chat template" in generate(nats, source, output, "--tokenizer", str(folder), code=1)
    assert output.read_bytes() == b""


@pytest.mark.parametrize("name", ["in.jsonl", "-"])
def test_an_input_without_rows_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An input without rows is named before the command connects, and no file is written."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(b"\n \n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n \n")))

    assert main(["generate", "--input", name, "--output", "out.parquet"]) == ExitCode.USAGE
    shown = "stdin" if name == "-" else name
    assert capsys.readouterr().err == f"rollbus: --input {shown} has no rows; expected one for each prompt\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_only_an_id_in_flight_is_replaced() -> None:
    """A row whose id a request in flight has is sent with another id. The ids of ended requests are not kept."""
    rows = [(index, b'{"prompt_token_ids": [1], "request_id": "a"}') for index in range(3)]
    run = GenerateRun(
        input=Input("stdin", "line", lambda: iter(rows), is_stream=True),
        defaults=Defaults(),
        summary=InputSummary(None, False, False, {}),
        results=Mock(finished={}, model=None),
        max_in_flight=2,
        bar=Mock(),
    )
    requests = run._requests()
    first, second = next(requests), next(requests)
    run._in_flight.pop(first.request_id)
    third = next(requests)

    assert first.request_id == third.request_id == "a" != second.request_id


@pytest.mark.parametrize(
    ("place", "problem"),
    [("none/out.jsonl", "none is not a directory"), (".", "is a directory; name a file in it")],
)
def test_a_wrong_place_of_the_output_is_found_first(tmp_path: Path, place: str, problem: str) -> None:
    """An output that cannot be written is a usage error before the command connects."""
    source = write(tmp_path / "in.jsonl", {"prompt_token_ids": [1]})

    assert problem in generate("nats://127.0.0.1:9", source, tmp_path / place, code=ExitCode.USAGE)


def test_a_full_disk_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that cannot hold the shortest results fails before the command connects, with both sizes."""
    source = write(tmp_path / "in.jsonl", *({"prompt_token_ids": [1]} for _ in range(5000)))
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    assert main(["generate", "--input", source, "--output", str(tmp_path / "out.jsonl")]) == ExitCode.FAILED
    assert "5,000 results need at least 0.002 GB, and the disk has 0.001 GB free" in capsys.readouterr().err


@pytest.mark.slow
def test_a_disk_that_becomes_full_is_named_and_the_same_command_continues(nats: str, tmp_path: Path) -> None:
    """The error has the file, and the size of the missing results. With free space, the same command completes them."""
    source = write(tmp_path / "in.jsonl", *({"prompt_token_ids": [1]} for _ in range(30)))
    words = ["generate", "--input", source, "--output", str(tmp_path / "out.jsonl"), "--json"]
    # The limit of 4 KiB a file stands for a full disk.
    full = subprocess.run(
        ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *command(*words)],
        env={**ENV, "ROLLBUS_NATS": nats},
        capture_output=True,
        text=True,
        check=False,
    )
    again = rollbus(*words, nats=nats)

    assert full.returncode == ExitCode.FAILED
    assert re.fullmatch(
        rf"rollbus: {tmp_path}/out.jsonl: File too large; [\d,]+ more results need about \d+ KiB, and the disk has .* "
        r"free; free space, then the same command continues\n",
        full.stderr,
    )
    assert json.loads(again.stdout)["resumed"] > 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 30


def test_the_bar_says_what_the_requests_wait_for() -> None:
    """While no worker serves, the bar has the state of each worker with its seconds."""
    starting = presence(worker="local-0", state=WorkerState.STARTING, uptime_s=12.4)

    assert wait_reason((starting,)) == "the requests wait: local-0 starts, 12 s"
    assert wait_reason(()) == "the requests wait: no worker is live"
    assert wait_reason((starting, presence(worker="local-1"))) == ""
