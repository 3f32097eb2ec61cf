"""First rows with the shapes of public data sets, and the files and directories that hold them."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.cli.exits import CommandFailed, ExitCode
from rollbus.frontend.cli.generate import inputs
from rollbus.frontend.cli.generate.inputs import NUM_CHECKED, Input, open_input
from rollbus.frontend.cli.generate.rows import Defaults, PromptLine, check_input, parse_prompt, read_prompts
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.options import pip_install

USER = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "Me."}
ULTRAFEEDBACK = {
    "prompt": "Who?",
    "prompt_id": "f0e3",
    "chosen": [USER, ANSWER],
    "rejected": [USER, ANSWER],
    "messages": [USER, ANSWER],
    "score_chosen": 6.5,
    "score_rejected": 5.0,
}
BATCH = {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions"}


def parse(row: dict[str, object], **defaults: Any) -> PromptLine:
    """Parse one row."""
    return parse_prompt(3, row, Defaults(**defaults))


@pytest.mark.parametrize(
    ("row", "options", "prompt"),
    [
        ({"question": "2+2?", "answer": "#### 4"}, {"prompt_field": "question"}, "2+2?"),
        ({"problem": "2+2?", "level": 1, "type": "Algebra"}, {"prompt_field": "problem"}, "2+2?"),
        ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "", "entry_point": "f"}, {}, "def f():"),
        ({"text": "Write f", "code": "", "task_id": 11, "test_list": ["assert"]}, {"prompt_field": "text"}, "Write f"),
        ({"instruction": "Who?", "input": "", "output": "Me."}, {"prompt_field": "instruction"}, "Who?"),
        (ULTRAFEEDBACK, {"prompt_field": "prompt"}, "Who?"),
        (ULTRAFEEDBACK, {"prompt_field": "messages", "messages": "drop-last"}, [USER]),
        (ULTRAFEEDBACK, {"prompt_field": "messages", "messages": "continue"}, [USER, ANSWER]),
        ({"prompt": [USER], "data_source": "gsm8k", "reward_model": {"style": "rule"}}, {}, [USER]),
        ({"messages": [USER], "source": "hand-made", "id": 7}, {}, [USER]),
        ({"messages": [USER, {"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "1"}]}, {}, 3),
        ({"problem": "2+2?", "seed": 4, "n": 2, "x": 1}, {"prompt_field": "problem", "row_options": "keep"}, "2+2?"),
    ],
)
def test_the_first_rows_of_public_data_sets_are_read(row: dict[str, object], options: Any, prompt: object) -> None:
    """The prompt comes from the known or the named field. A row with data stands as it came beside its result."""
    line = parse(row, **options)

    if isinstance(prompt, int):
        assert (line.prompt, line.row) == (row["messages"], None)
    else:
        assert (line.prompt, line.row) == (prompt, row)
    assert line.fields["sampling"] == {}
    assert line.continues is (options.get("messages") == "continue")


@pytest.mark.parametrize("name", ["n", "seed", "model", "priority", "tools", "sampling"])
def test_an_option_in_a_row_of_data_is_an_error_that_names_both_ways(name: str) -> None:
    """A row of data with a known option fails by name. `read` uses the option, `keep` keeps it as data."""
    row: dict[str, object] = {"prompt": "a", "answer": "4", name: {"model": "m"}.get(name, 3)}

    with pytest.raises(InvalidRequest, match=rf"{name} is an option, in a row with data \(answer\).*read.*keep"):
        parse(row)
    kept = parse(row, row_options="keep")
    assert (kept.row, kept.fields) == (row, {"sampling": {}})


def test_options_of_a_row_of_data_are_read_on_request() -> None:
    """With `--row-options read`, a row of data sets options as a row of known fields does."""
    row: dict[str, object] = {"prompt": "a", "answer": "4", "seed": 3, "model": "m"}
    line = parse(row, row_options="read")

    assert (line.fields, line.row) == ({"model": "m", "sampling": {"seed": 3}}, row)
    assert parse({"prompt": "a", "seed": 3}).row is None


@pytest.mark.parametrize(
    ("row", "options", "error"),
    [
        (
            {"question": "?", "answer": "4"},
            {},
            r"the row has no prompt; allowed: .*--prompt-field with one of.*question, ans",
        ),
        ({"promt": "a"}, {}, r"has no prompt \(did you mean promt\?\); .*--prompt-field with one"),
        ({"question": "a"}, {"prompt_field": "qestion"}, r"has no qestion \(did you mean question\?\); "),
        (ULTRAFEEDBACK, {}, "prompt and messages are both set; allowed: one of them; --prompt-field prompt"),
        ({"messages": [USER, ANSWER]}, {}, "messages end with the assistant; allowed: --messages drop-last.*continue"),
        ({"messages": [ANSWER]}, {"messages": "drop-last"}, "messages have only turns of the assistant"),
        ({"messages": [{"from": "human", "value": "a"}]}, {}, r"messages\[0\].role is missing \(from, value\)"),
        ({"messages": [USER, "a"]}, {}, r"messages\[1\] is 'a'; allowed: a message"),
        ({"messages": [{"role": "user", "content": 1}]}, {}, r"messages\[0\].content is 1"),
        ({"messages": []}, {}, "messages is a list of length 0"),
        ({"messages": [USER], "tools": "[]"}, {}, r"tools is '\[\]'; allowed: a list of objects"),
        ({"prompt": "a", "max_new_tokens": 3}, {}, r"max_new_tokens is not an option \(did you mean max_tokens\?\); "),
        ({**BATCH, "body": []}, {}, "body is a list"),
        ({**BATCH, "body": {"model": "m"}}, {}, "body.messages is missing"),
        ({**BATCH, "body": {"messages": [USER], "temprature": 1}}, {}, "body.temprature .*did you mean temperature"),
        ({**BATCH, "body": {"messages": [USER], "stop": ["a"]}}, {}, "body.stop is not supported here"),
        ({**BATCH, "url": "/v1/embeddings", "body": {"input": "a"}}, {}, "url is '/v1/embeddings'"),
    ],
)
def test_a_wrong_row_says_what_to_do(row: dict[str, object], options: Any, error: str) -> None:
    """The error of a row names the field, and the option or the spelling that helps."""
    with pytest.raises(InvalidRequest, match=error):
        parse(row, **options)


def test_a_line_of_a_batch_is_read_as_over_http() -> None:
    """A line of OpenAI's batch API keeps its `custom_id`. Its body has the meaning that it has over HTTP."""
    body = {"model": "m", "messages": [USER], "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}
    chat = parse({**BATCH, "body": {**body, "user": "u", "stream": False, "seed": None}})
    text = parse({**BATCH, "url": "/v1/completions", "body": {"model": "m", "prompt": "a", "max_tokens": 3}})

    assert (chat.request_id, chat.prompt) == ("request-1", [USER])
    assert chat.fields == {"model": "m", "sampling": {"max_tokens": 9, "logprobs": 2}}
    short: dict[str, object] = {**BATCH, "body": {"messages": [USER]}}
    assert parse(short).fields["sampling"] == {"max_tokens": None}
    assert parse(short, sampling={"max_tokens": 5}).fields["sampling"] == {"max_tokens": 5}
    assert (text.prompt, text.fields) == ("a", {"model": "m", "sampling": {"max_tokens": 3}})
    assert chat.row == {**BATCH, "body": {**body, "user": "u", "stream": False, "seed": None}}


def test_the_fingerprint_depends_on_the_data_of_a_row() -> None:
    """A row of data with other data is another row, because its result contains it."""
    assert parse({"prompt": "a", "x": 1}).fingerprint != parse({"prompt": "a", "x": 2}).fingerprint
    assert parse({"messages": [USER]}).fingerprint != parse({"messages": [ANSWER, USER]}).fingerprint


def rows_of(source: Input) -> list[object]:
    """Return all rows of an input."""
    return [row for _, row in source.rows()]


ROWS: list[dict[str, object]] = [
    {"prompt": [USER], "reward_model": {"ground_truth": str(index), "style": "rule"}, "id": index} for index in range(3)
]


@pytest.fixture
def parquet_file(tmp_path: Path) -> Path:
    """Write a parquet file with nested messages."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "data" / "train.parquet"
    path.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def test_parquet_is_read_whatever_its_name(parquet_file: Path, tmp_path: Path) -> None:
    """The rows of a parquet file, with nested messages, are found by its first bytes and may be read twice."""
    renamed = parquet_file.rename(tmp_path / "data.bin")
    source = open_input(str(renamed))

    assert rows_of(source) == rows_of(source) == ROWS
    assert [prompt.prompt for prompt in read_prompts(source, Defaults())] == [[USER]] * 3
    assert source.place(1) == f"{renamed} row 2"


def test_a_torn_parquet_file_is_a_usage_error(parquet_file: Path) -> None:
    """A file named .parquet without its end, without bytes or with lines of JSON is not a parquet file."""
    whole = parquet_file.read_bytes()
    for damaged in (whole[:-9], whole[:9], b"", b'{"prompt": "a"}'):
        parquet_file.write_bytes(damaged)

        with pytest.raises(CommandFailed, match=r"train.parquet is not a parquet file: ") as caught:
            rows_of(open_input(str(parquet_file)))
        assert caught.value.exit_code == ExitCode.USAGE


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep the package datasets off the network, with a cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    progress = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    yield
    if progress:
        datasets.enable_progress_bars()


@pytest.mark.slow
@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("streams", [False, True])
def test_a_directory_of_a_data_set_is_read(parquet_file: Path, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with files of a data set is read by `datasets`, with a split on request."""
    folder = parquet_file.parent
    (folder / "test.parquet").write_bytes(parquet_file.read_bytes())

    with pytest.raises(CommandFailed, match="has several splits; choose one with --split: train, test"):
        open_input(str(folder))
    monkeypatch.chdir(folder)
    source = open_input(".", split="test", streams=streams)
    check_input(source, Defaults(), {})
    assert (rows_of(source), source.is_stream) == (ROWS, streams)


@pytest.mark.slow
@pytest.mark.usefixtures("no_hub")
def test_a_saved_data_set_is_read(tmp_path: Path) -> None:
    """A directory that `save_to_disk` wrote is read, with one split or several."""
    import datasets

    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "several")

    assert rows_of(open_input(str(tmp_path / "one"))) == ROWS
    assert rows_of(open_input(str(tmp_path / "several"))) == ROWS
    with pytest.raises(CommandFailed, match="has no split test; choose one with --split: train"):
        open_input(str(tmp_path / "several"), split="test")


def test_a_data_set_by_name_is_fixed_to_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run reads the newest commit of a data set on the Hub. A later run reads the commit of the first."""
    import datasets

    loaded: list[object] = []

    def load(*args: object, **options: object) -> datasets.Dataset:
        loaded.append((args, options))
        return made

    made = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(inputs, "_newest_commit", lambda name: f"newest of {name}")
    monkeypatch.setattr(datasets, "load_dataset", load)

    first = open_input("org/name", subset="main", split="train")
    second = open_input("org/name", split="train", revision="first")

    assert (first.revision, second.revision, rows_of(first)) == ("newest of org/name", "first", ROWS)
    assert loaded == [
        (("org/name", subset), {"split": "train", "streaming": False, "revision": revision})
        for subset, revision in (("main", "newest of org/name"), (None, "first"))
    ]


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without pyarrow or datasets, the error has the command that installs the extra."""
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(CommandFailed, match=re.escape(f"a data set needs the package datasets: {pip_install('data')}")):
        open_input("openai/gsm8k")
    with pytest.raises(CommandFailed, match=r"\[data\]"):
        open_input(str(tmp_path))


def test_a_misspelled_file_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file is named with the nearest name in its directory, and is not looked up on the Hub."""
    (tmp_path / "prompts.jsonl").touch()
    monkeypatch.chdir(tmp_path)

    for name in ("promts.jsonl", str(tmp_path / "promts.jsonl")):
        with pytest.raises(CommandFailed, match=r"promts.jsonl does not exist \(did you mean prompts.jsonl\?\)"):
            open_input(name)
    with pytest.raises(CommandFailed, match="none is not a directory"):
        open_input(str(tmp_path / "none" / "prompts.jsonl"))
    with pytest.raises(CommandFailed, match="--split has no effect on a file"):
        open_input("prompts.jsonl", split="train")


def test_only_the_first_rows_of_a_stream_are_checked() -> None:
    """The check of a stream reads its first 1,000 rows. The run then reads all rows, each once."""
    rows = [{"prompt": "a"} if index < NUM_CHECKED else {} for index in range(NUM_CHECKED + 2)]
    source = Input("stdin", "line", lambda: ((i, json.dumps(row).encode()) for i, row in enumerate(rows)), True)

    assert check_input(source, Defaults(), {}).num_prompts is None
    assert [index for index, _ in source.rows()] == list(range(NUM_CHECKED + 2))
