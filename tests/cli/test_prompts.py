"""`rollbus generate` with data as it is, on a fleet with a synthetic engine."""

import io
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyarrow import parquet

from rollbus.frontend.cli.app import main
from rollbus.frontend.cli.exits import CommandFailed, ExitCode
from rollbus.frontend.cli.generate.inputs import Input, open_input
from rollbus.frontend.cli.generate.rows import (
    Defaults,
    InputSummary,
    PromptLine,
    check_input,
    parse_prompt,
    read_prompts,
)
from rollbus.frontend.cli.generate.run import GenerateRun, wait_reason
from rollbus.frontend.tokenization import load_tokenizer
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.presence import WorkerState
from tests.cli.support import ENV, command, rollbus
from tests.http.support import make_byte_level, save
from tests.support.fleet import presence


class Letters:
    """A tokenizer that makes one token of each letter."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: object) -> str:
        return "".join(message["content"] for message in messages)


def parse(line: object, defaults: Defaults | None = None, index: int = 0) -> PromptLine:
    """Parse one line of the input."""
    return parse_prompt(index, json.dumps(line).encode(), defaults or Defaults())


def write(path: Path, *lines: object) -> Input:
    """Write an input file. Strings are written as they are, other values as JSON."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return open_input(str(path))


def test_sampling_parameters_are_beside_the_prompt_or_under_sampling() -> None:
    """Sampling parameters have the same meaning beside the prompt, under `sampling`, or mixed."""
    beside = parse({"prompt_token_ids": [1, 2], "max_tokens": 5, "temperature": 0})
    nested = parse({"prompt_token_ids": [1, 2], "sampling": {"max_tokens": 5, "temperature": 0}})
    mixed = parse({"prompt_token_ids": [1, 2], "max_tokens": 5, "sampling": {"temperature": 0}})

    assert beside.request(None).sampling == nested.request(None).sampling == mixed.request(None).sampling
    assert beside.fingerprint == nested.fingerprint == mixed.fingerprint


def test_text_is_tokenized_when_the_request_is_made() -> None:
    """A text prompt needs a tokenizer, and its request has the token ids."""
    prompt = parse({"prompt": "ab", "routed_experts_prompt_start": 2})

    assert prompt.request(Letters()).prompt_token_ids.tolist() == [97, 98]  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match="prompt is text"):
        prompt.request(None)


def test_a_start_of_the_rows_beyond_the_prompt_is_rejected() -> None:
    """A start of the rows beyond a text prompt passes parsing.

    It is rejected with the allowed range after tokenization.
    """
    prompt = parse({"prompt": "ab", "routed_experts_prompt_start": 3})

    with pytest.raises(InvalidRequest, match="routed_experts_prompt_start is 3; allowed: an integer from 0 to 2"):
        prompt.request(Letters())


@pytest.mark.parametrize(
    ("line", "field", "problem"),
    [
        ("{", "the line", "is not JSON"),
        ('{"prompt": "\xff', "the line", "is not JSON"),
        ([1], "the line", "is a list"),
        ("null", "the line", "is None"),
        ({}, "the row", "has no prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt and prompt_token_ids", "are both set"),
        ({"prompt": ""}, "prompt", "is ''"),
        ({"prompt": 5}, "prompt", "is 5"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "has 0 entries"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids[1]", "is -1"),
        ({"prompt": "a", "max_token": 5}, "max_token", "is not an option (did you mean max_tokens?); allowed: "),
        (
            {"prompt": "a", "sampling": {"max_token": 5}},
            "sampling.max_token",
            "is unknown (did you mean max_tokens?); allowed: ",
        ),
        ({"prompt": "a", "sampling": []}, "sampling", "is a list"),
        ({"prompt": "a", "seed": 1, "sampling": {"seed": 1}}, "seed", "is set both beside and under sampling"),
        ({"prompt": "a", "top_p": 0}, "sampling.top_p", "is 0"),
        ({"prompt": "a", "routed_experts_prompt_start": -1}, "routed_experts_prompt_start", "is -1"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: object, field: str, problem: str) -> None:
    """Each mistake is a usage error that names file, line, field and problem."""
    path = tmp_path / "in.jsonl"
    source = write(path, {"prompt": "fine"}, line)

    with pytest.raises(CommandFailed) as caught:
        list(read_prompts(source, Defaults()))

    assert caught.value.exit_code == ExitCode.USAGE
    assert str(caught.value).startswith(f"{path} line 2: {field} {problem}")


def test_the_value_of_a_line_takes_precedence_over_its_default() -> None:
    """The value of a line takes precedence over its default, and the other defaults still apply."""
    defaults = Defaults({"model": "m", "timeout_s": 5.0}, {"max_tokens": 7, "seed": 3})
    request = parse({"prompt_token_ids": [1], "max_tokens": 9, "model": "other"}, defaults).request(None)

    assert (request.model, request.timeout_s) == ("other", 5.0)
    assert (request.sampling.max_tokens, request.sampling.seed) == (9, 3)


def test_routed_experts_are_refused_if_the_command_writes_none() -> None:
    """return_routed_experts true in a line is refused if the command writes no routed experts."""
    defaults = Defaults({"return_routed_experts": False})

    assert parse({"prompt_token_ids": [1]}, defaults).request(None).return_routed_experts is False
    with pytest.raises(InvalidRequest, match="return_routed_experts is true"):
        parse({"prompt_token_ids": [1], "return_routed_experts": True}, defaults)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "b"},
        {"max_tokens": 6},
        {"seed": 1},
        {"request_id": "x"},
        {"model": "m"},
        {"cache_salt": "s"},
        {"routed_experts_prompt_start": 1},
        {"return_routed_experts": False},
    ],
)
def test_the_fingerprint_depends_on_fields_that_change_the_result(change: dict[str, object]) -> None:
    """The fingerprint changes with prompt, sampling, model, request id, cache salt and routed experts."""
    line = {"prompt": "a", "max_tokens": 5}

    assert parse(line).fingerprint != parse({**line, **change}).fingerprint


@pytest.mark.parametrize("change", [{"timeout_s": 9}, {"priority": 2}, {"session_id": "s"}, {"group_id": "g"}])
def test_the_fingerprint_ignores_fields_that_do_not_change_the_result(change: dict[str, object]) -> None:
    """The fingerprint ignores time limit, priority, session and group, so that finished results remain usable."""
    line = {"prompt": "a", "max_tokens": 5}

    assert parse(line).fingerprint == parse({**line, **change}).fingerprint


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    """The index of a prompt is the number of its line, and blank lines count."""
    path = write(tmp_path / "in.jsonl", {"prompt": "a"}, "", {"prompt_token_ids": [1]}, "  ")

    assert [prompt.index for prompt in read_prompts(path, Defaults())] == [0, 2]
    assert check_input(path, Defaults(), {}).num_prompts == 2
    assert check_input(path, Defaults(), {}).needs_tokenizer


@pytest.mark.parametrize("given", ["a", "a ", 7, None, ["x", 1], {"k": 1}, "é" * 2000, ""])
def test_ids_of_any_form_are_kept_and_may_repeat(tmp_path: Path, given: object) -> None:
    """A row keeps its id in any of JSON's types. Ids that repeat are counted and are no error."""
    source = write(tmp_path / "in.jsonl", *({"prompt": text, "request_id": given} for text in "abc"))
    prompts = list(read_prompts(source, Defaults()))

    assert [prompt.request_id for prompt in prompts] == (
        ["input-0", "input-1", "input-2"] if given is None else [given] * 3
    )
    assert check_input(source, Defaults(), {}).repeated_ids == (0 if given is None else 2)
    assert len({prompt.fingerprint for prompt in prompts}) == 3


def test_results_of_another_input_are_refused(tmp_path: Path) -> None:
    """A changed or missing line of the input is found before any request is sent."""
    old = write(tmp_path / "old.jsonl", {"prompt": "a"}, {"prompt": "b"})
    finished = {prompt.index: prompt.fingerprint for prompt in read_prompts(old, Defaults())}
    changed = write(tmp_path / "changed.jsonl", {"prompt": "a"}, {"prompt": "c"})
    shorter = write(tmp_path / "shorter.jsonl", {"prompt": "a"})
    longer = write(tmp_path / "longer.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})

    with pytest.raises(CommandFailed, match="line 2 differs from the row of its result"):
        check_input(changed, Defaults(), finished)
    with pytest.raises(CommandFailed, match="lacks 1 of the rows"):
        check_input(shorter, Defaults(), finished)
    assert check_input(longer, Defaults(), finished).num_prompts == 3


# `rollbus generate` with data as it is, on a fleet with a synthetic engine.


USER = {"role": "user", "content": "the"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Return the directory of a tokenizer."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    return str(save(make_byte_level(), folder))


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
    source = write(tmp_path / "in.jsonl", *rows, rows[1]).name
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
    source = write(tmp_path / "in.jsonl", row).name
    assert "line 1: messages end with the assistant" in generate(nats, source, output, code=ExitCode.USAGE)
    generate(nats, source, output, "--messages", "continue", "--with-prompt", "--tokenizer", tokenizer)

    [result] = parquet.read_table(output).to_pylist()
    assert (json.loads(result["prompt"]), json.loads(result["row"])) == (row["messages"], row)
    expected = load_tokenizer(Path(tokenizer)).encode("<user>the<|end|><assistant>th", add_special_tokens=False)
    assert (result["prompt_token_ids"], result["prompt_len"]) == (expected, len(expected))


@pytest.mark.slow
def test_a_changed_option_is_named(nats: str, tmp_path: Path) -> None:
    """A later run with another option names it with its first value, and one with other rows names the row."""
    source, output = write(tmp_path / "in.jsonl", {"prompt_token_ids": [1], "x": 1}).name, tmp_path / "out.jsonl"
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
    source = write(tmp_path / "in.jsonl", *rows).name

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
    source = write(tmp_path / "in.jsonl", {"prompt_token_ids": [1]}, {"messages": [USER]}).name
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
    ("place", "problem"), [("none/out.jsonl", "none is not a directory"), (".", "is a directory; name a file in it")]
)
def test_a_wrong_place_of_the_output_is_found_first(tmp_path: Path, place: str, problem: str) -> None:
    """An output that cannot be written is a usage error before the command connects."""
    source = write(tmp_path / "in.jsonl", {"prompt_token_ids": [1]}).name

    assert problem in generate("nats://127.0.0.1:9", source, tmp_path / place, code=ExitCode.USAGE)


def test_a_full_disk_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that cannot hold the shortest results fails before the command connects, with both sizes."""
    source = write(tmp_path / "in.jsonl", *({"prompt_token_ids": [1]} for _ in range(5000))).name
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    assert main(["generate", "--input", source, "--output", str(tmp_path / "out.jsonl")]) == ExitCode.FAILED
    assert "5,000 results need at least 0.002 GB, and the disk has 0.001 GB free" in capsys.readouterr().err


@pytest.mark.slow
def test_a_disk_that_becomes_full_is_named_and_the_same_command_continues(nats: str, tmp_path: Path) -> None:
    """The error has the file, and the size of the missing results. With free space, the same command completes them."""
    source = write(tmp_path / "in.jsonl", *({"prompt_token_ids": [1]} for _ in range(30))).name
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
