import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from rollbus.frontend.cli.exits import CommandFailed
from rollbus.frontend.cli.generate.results import error_line, open_results, parquet_results, result_line
from rollbus.frontend.cli.generate.rows import Defaults, PromptLine, parse_prompt
from rollbus.schemas.errors import ErrorCode, RequestFailed
from tests.cli.test_results import generation

ROW = {"prompt": "a", "answer": {"value": [1, None]}}
PROMPTS = [parse_prompt(index, json.dumps({**ROW, "request_id": index}).encode(), Defaults()) for index in range(3)]
LATE = RequestFailed(code=ErrorCode.TIMEOUT, message="late")


def line_of(prompt: PromptLine) -> dict[str, object]:
    """Return the line of a prompt with two samples."""
    result = generation(prompt.index, siblings=(generation(prompt.index, child=1),))
    return result_line(prompt, result, None, None, with_prompt=True)


def write(path: Path, *lines: Any) -> set[int]:
    """Write lines in one run. Return the prompts that were finished before."""
    with parquet_results(path) as part, open_results(part, None) as results:
        for line in lines:
            results.append({**line})
        return set(results.finished)


def test_results_become_columns(tmp_path: Path) -> None:
    """Results have typed columns. Arrays of experts are bytes, and values of any type are JSON text."""
    path = tmp_path / "out.parquet"
    write(path, line_of(PROMPTS[1]), line_of(PROMPTS[0]))

    first, second = parquet.read_table(path).to_pylist()
    assert (first["index"], first["request_id"], second["index"]) == (1, "1", 0)
    assert json.loads(first["row"]) == {**ROW, "request_id": 1}
    assert (first["prompt"], first["prompt_token_ids"], first["token_ids"]) == ("a", [1], [7, 8])
    assert first["routed_experts"] == {"start": 0, "shape": [2, 2, 3], "dtype": "u1", "data": b"\1" * 12, "key": None}
    assert first["siblings"][0]["routed_experts"]["data"] == b"\2" * 12
    assert first["error"] is None
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.proves("P30")
def test_a_run_continues_a_parquet_output(tmp_path: Path) -> None:
    """Failed prompts are sent again. Finished results stay equal, also those of a complete file."""
    path = tmp_path / "out.parquet"
    write(path, line_of(PROMPTS[0]), error_line(PROMPTS[1], LATE))
    before = parquet.read_table(path).to_pylist()

    assert before[1]["error"]["message"] == "late"
    assert write(path, line_of(PROMPTS[1])) == {0}
    assert write(path, line_of(PROMPTS[2])) == {0, 1}
    after = parquet.read_table(path).to_pylist()
    assert [row["index"] for row in after] == [0, 1, 2]
    assert after[0] == before[0]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.proves("P30")
def test_a_crash_loses_no_line(tmp_path: Path) -> None:
    """The lines of a run that was killed are finished in the next run, up to the line that was torn."""
    path = tmp_path / "out.parquet"
    with pytest.raises(TypeError):
        write(path, line_of(PROMPTS[0]), None)
    assert parquet.read_table(path).num_rows == 1
    part = tmp_path / "out.parquet.part.jsonl"
    with part.open("ab") as file:
        file.write(b'{"index":1,"fing')

    assert write(path, line_of(PROMPTS[1])) == {0}
    assert parquet.read_table(path)["index"].to_pylist() == [0, 1]
    assert not part.exists()


@pytest.mark.parametrize("content", [b"not parquet", None])
def test_a_file_that_is_no_output_is_refused_unchanged(tmp_path: Path, content: bytes | None) -> None:
    """A file that is not parquet, or has no results, is refused and stays unchanged."""
    import pyarrow

    path = tmp_path / "out.parquet"
    if content is None:
        parquet.write_table(pyarrow.table({"a": [1]}), path)
        content = path.read_bytes()
    path.write_bytes(content)

    with pytest.raises(CommandFailed, match=r"out.parquet is not a file of results"):
        write(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == content
