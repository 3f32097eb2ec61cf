import base64
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pyarrow import parquet

from rollbus import FinishReason, GenerateRequest, Generation, TokenMasks
from rollbus.frontend.cli.exits import CommandFailed, ExitCode
from rollbus.frontend.cli.generate.results import (
    ResultsFile,
    RowsFile,
    error_line,
    first_error,
    open_results,
    parquet_results,
    result_line,
)
from rollbus.frontend.cli.generate.rows import Defaults, PromptLine, parse_prompt
from rollbus.schemas.errors import ErrorCode, InvalidRequest, RequestFailed

PROMPTS = [parse_prompt(i, json.dumps({"prompt_token_ids": [i]}).encode(), Defaults()) for i in range(3)]


def generation(index: int, child: int = 0, **fields: Any) -> Generation:
    """Return a finished result of two tokens. Its expert ids contain its index and child."""
    values: dict[str, Any] = {
        "request": GenerateRequest(prompt_token_ids=[index], request_id=f"input-{index}"),
        "request_id": f"input-{index}",
        "child": child,
        "prompt_len": 1,
        "token_ids": np.array([7, 8], np.int32),
        "logprobs": np.array([-0.1, -np.inf], np.float32),
        "weight_versions": np.array([3, 3], np.int32),
        "routed_experts": np.full((2, 2, 3), index + child, np.uint8),
        "start": 0,
        "finish_reason": FinishReason.LENGTH,
    }
    return Generation(**{**values, **fields})


def line_of(prompt: PromptLine, results: ResultsFile, **fields: Any) -> dict[str, object]:
    """Return the line of a finished prompt."""
    return result_line(prompt, generation(prompt.index, **fields), None, results.rows)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines of an output."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_all_values_of_its_result(tmp_path: Path) -> None:
    """Routed experts in a line decode to the array, minus infinity becomes -9999, and float32 values stay exact."""
    path = tmp_path / "out.jsonl"
    adapter = np.array([5, 5], np.int32)
    masks = TokenMasks(np.array([2, 1], np.int32), np.array([7, 9, 8], np.int32))
    result = generation(
        1, model="m", stop_reason=8, cached_tokens=0, worker_ids=("w",), lora_versions=adapter, sampling_mask=masks
    )

    with open_results(path, None) as results:
        results.append(result_line(PROMPTS[1], result, None, results.rows))

    [line] = read(path)
    routed = line.pop("routed_experts")
    logprobs = line.pop("logprobs")
    assert line.pop("sampling_mask") == [[7, 9], [8]]
    assert line == {
        "index": 1,
        "request_id": "input-1",
        "fingerprint": PROMPTS[1].fingerprint,
        "model": "m",
        "lora": None,
        "prompt_len": 1,
        "token_ids": [7, 8],
        "finish_reason": "length",
        "stop_reason": 8,
        "weight_versions": [3, 3],
        "lora_versions": [5, 5],
        "attempts": 1,
        "worker_ids": ["w"],
        "cached_tokens": 0,
    }
    assert (np.float32(logprobs[0]), logprobs[1]) == (np.float32(-0.1), -9999.0)
    assert (routed["start"], routed["shape"], routed["dtype"]) == (0, [2, 2, 3], "u1")
    array = np.frombuffer(base64.b64decode(routed["data"]), routed["dtype"]).reshape(routed["shape"])
    np.testing.assert_array_equal(array, result.routed_experts)


def test_all_samples_of_a_prompt_are_in_one_line(tmp_path: Path) -> None:
    """The samples of a prompt are siblings in one line, and each sample has its own array in the .npz."""
    path, rows_path = tmp_path / "out.jsonl", tmp_path / "out.npz"

    with open_results(path, rows_path) as results:
        results.append(line_of(PROMPTS[1], results, siblings=(generation(1, child=1), generation(1, child=2))))

    [line] = read(path)
    keys = [sample["routed_experts"]["key"] for sample in (line, *line["siblings"])]
    assert keys == ["1", "1.1", "1.2"]
    with np.load(rows_path) as arrays:
        assert [int(arrays[key][0, 0, 0]) for key in keys] == [1, 2, 3]


def test_missing_routed_experts_are_null_and_logprobs_are_omitted(tmp_path: Path) -> None:
    """Missing routed experts are null. Logprobs that were not requested have no field."""
    with open_results(tmp_path / "out.jsonl", None) as results:
        line = line_of(PROMPTS[0], results, routed_experts=None, logprobs=None)

    assert line["routed_experts"] is None
    assert "logprobs" not in line
    assert "prompt_logprobs" not in line


def test_an_error_names_code_and_field() -> None:
    """The line of a failed prompt has the error with code and field, and states whether a retry can succeed."""
    wrong = InvalidRequest(field="sampling.n", problem="is 0", allowed="1 or more")

    assert error_line(PROMPTS[0], wrong)["error"] == {
        "code": "invalid_request",
        "message": "sampling.n is 0; allowed: 1 or more",
        "retryable": False,
        "field": "sampling.n",
    }


def test_one_failed_sample_fails_the_prompt() -> None:
    """A prompt is done only if all its samples are done."""
    error = RequestFailed(code=ErrorCode.ENGINE_ERROR, message="no")
    sibling = generation(0, child=1, finish_reason=FinishReason.ERROR, error=error)

    assert first_error(generation(0, siblings=(sibling,))) is error
    assert first_error(generation(0, siblings=(generation(0, child=1),))) is None


@pytest.mark.proves("P30")
@pytest.mark.slow
@pytest.mark.parametrize("with_npz", [False, True])
def test_a_run_that_crashed_at_any_byte_is_resumed(tmp_path: Path, with_npz: bool) -> None:
    """After a crash at any byte, the next run keeps the complete lines, and each prompt ends with one line."""
    whole = tmp_path / "whole.jsonl"
    with open_results(whole, tmp_path / "whole.npz" if with_npz else None) as results:
        for prompt in PROMPTS:
            results.append(line_of(prompt, results))
    content = whole.read_bytes()
    for size in range(0, len(content) + 1, 5):
        path = tmp_path / f"{size}.jsonl"
        rows_path = path.with_suffix(".npz") if with_npz else None
        path.write_bytes(content[:size])
        if rows_path is not None:
            rows_path.write_bytes((tmp_path / "whole.npz").read_bytes())
        with open_results(path, rows_path) as results:
            assert len(results.finished) == content[:size].count(b"\n")
            for prompt in PROMPTS:
                if prompt.index not in results.finished:
                    results.append(line_of(prompt, results))

        assert path.read_bytes() == content
        if rows_path is not None:
            with np.load(rows_path) as arrays:
                assert sorted(arrays) == ["0", "1", "2"]


def test_failed_prompts_are_tried_again(tmp_path: Path) -> None:
    """The next run removes error lines, keeps the other lines, and leaves one line per prompt."""
    path = tmp_path / "out.jsonl"
    error = RequestFailed(code=ErrorCode.TIMEOUT, message="late")
    with open_results(path, None) as results:
        results.append(line_of(PROMPTS[2], results))
        results.append(error_line(PROMPTS[0], error))
        results.append(line_of(PROMPTS[1], results))

    with open_results(path, None) as results:
        assert results.finished == {prompt.index: prompt.fingerprint for prompt in PROMPTS[1:]}
        results.append(line_of(PROMPTS[0], results))

    assert [line["index"] for line in read(path)] == [2, 1, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_prompt_whose_rows_are_missing_is_not_finished(tmp_path: Path) -> None:
    """If the .npz is missing, prompts with rows in it are not finished."""
    path, rows_path = tmp_path / "out.jsonl", tmp_path / "out.npz"
    with open_results(path, rows_path) as results:
        results.append(line_of(PROMPTS[0], results))
        results.append(line_of(PROMPTS[1], results, routed_experts=None))
    rows_path.unlink()

    with open_results(path, rows_path) as results:
        assert list(results.finished) == [1]


def test_an_output_with_an_npz_is_not_continued_without_the_npz(tmp_path: Path) -> None:
    """An output with an .npz cannot be continued without it, because that would discard rows."""
    path = tmp_path / "out.jsonl"
    with open_results(path, tmp_path / "out.npz") as results:
        results.append(line_of(PROMPTS[0], results))

    with pytest.raises(CommandFailed, match="need --routed-experts npz"), open_results(path, None):
        pass


@pytest.mark.parametrize("content", [b"not ours", b'{"prompt": "a"}\n', b"{}\nab", b'{"index":0}\n', b"\xff\n"])
def test_a_file_that_is_no_output_is_refused_unchanged(tmp_path: Path, content: bytes) -> None:
    """A file that is not an output is refused and stays unchanged, also if its last line has no end."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)

    with pytest.raises(CommandFailed, match="line 1 is not a result") as caught, open_results(path, None):
        pass
    assert caught.value.exit_code == ExitCode.USAGE
    assert path.read_bytes() == content


def test_two_runs_do_not_write_to_one_output(tmp_path: Path) -> None:
    """A second run on the same output is refused while the first runs, also after the first rewrote the file."""
    path = tmp_path / "out.jsonl"
    with open_results(path, None) as results:
        results.append(error_line(PROMPTS[0], RequestFailed(code=ErrorCode.TIMEOUT, message="late")))
        with pytest.raises(CommandFailed, match="another process is writing"), open_results(path, None):
            pass
    with (
        open_results(path, None),
        pytest.raises(CommandFailed, match="another process is writing"),
        open_results(path, None),
    ):
        pass


def test_an_output_has_a_model_only_if_one_model_generated_it(tmp_path: Path) -> None:
    """The model of an output is that of all its results. It has none if it is empty, or if there are several models."""
    path = tmp_path / "out.jsonl"
    found = []
    for prompt, model in zip(PROMPTS, ("a", "a", "b"), strict=True):
        with open_results(path, None) as results:
            found.append(results.model)
            results.append(line_of(prompt, results, model=model))
    with open_results(path, None) as results:
        found.append(results.model)

    assert found == [None, "a", "a", None]


ROW = {"prompt": "a", "answer": {"value": [1, None]}}
PARQUET_RESULTS_PROMPTS = [
    parse_prompt(index, json.dumps({**ROW, "request_id": index}).encode(), Defaults()) for index in range(3)
]
LATE = RequestFailed(code=ErrorCode.TIMEOUT, message="late")


def line_of_of_parquet_results(prompt: PromptLine) -> dict[str, object]:
    """Return the line of a prompt with two samples."""
    result = generation(prompt.index, siblings=(generation(prompt.index, child=1),))
    return result_line(prompt, result, None, None, with_prompt=True)


def write(path: Path, *lines: Any) -> set[int]:
    """Write lines in one run. Return the prompts that were finished before."""
    with parquet_results(path, None) as results:
        for line in lines:
            results.append({**line})
        return set(results.finished)


def test_results_become_columns(tmp_path: Path) -> None:
    """Results have typed columns. Arrays of experts are bytes, and values of any type are JSON text."""
    path = tmp_path / "out.parquet"
    write(
        path,
        line_of_of_parquet_results(PARQUET_RESULTS_PROMPTS[1]),
        line_of_of_parquet_results(PARQUET_RESULTS_PROMPTS[0]),
    )

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
    write(path, line_of_of_parquet_results(PARQUET_RESULTS_PROMPTS[0]), error_line(PARQUET_RESULTS_PROMPTS[1], LATE))
    before = parquet.read_table(path).to_pylist()

    assert before[1]["error"]["message"] == "late"
    assert write(path, line_of_of_parquet_results(PARQUET_RESULTS_PROMPTS[1])) == {0}
    assert write(path, line_of_of_parquet_results(PARQUET_RESULTS_PROMPTS[2])) == {0, 1}
    after = parquet.read_table(path).to_pylist()
    assert [row["index"] for row in after] == [0, 1, 2]
    assert after[0] == before[0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_continues_a_parquet_output_with_an_npz(tmp_path: Path) -> None:
    """Arrays of experts in an `.npz` have only a key in the parquet file, which the next run reads."""
    path, rows_path = tmp_path / "out.parquet", tmp_path / "out.npz"
    for prompt in PROMPTS[:2]:
        with parquet_results(path, rows_path) as results:
            results.append(line_of(prompt, results))

    routed = [row["routed_experts"] for row in parquet.read_table(path).to_pylist()]
    assert [(each["key"], each["data"]) for each in routed] == [("0", None), ("1", None)]
    assert sorted(np.load(rows_path)) == ["0", "1"]


@pytest.mark.proves("P30")
def test_a_crash_loses_no_line(tmp_path: Path) -> None:
    """After a full disk or a kill, the next run uses the lines up to the torn one. One run at a time writes them."""
    path, part = tmp_path / "out.parquet", tmp_path / "out.parquet.part.jsonl"
    with suppress(ZeroDivisionError), parquet_results(path, None) as results:
        results.append(line_of_of_parquet_results(PARQUET_RESULTS_PROMPTS[0]))
        with part.open("ab") as file:
            file.write(b'{"index":1,"fing')
        with pytest.raises(CommandFailed, match="another process is writing"):
            write(path)
        assert not path.exists()
        raise ZeroDivisionError
    assert parquet.read_table(path).num_rows == 1

    assert write(path, line_of_of_parquet_results(PARQUET_RESULTS_PROMPTS[1])) == {0}
    assert parquet.read_table(path)["index"].to_pylist() == [0, 1]
    assert not part.exists()


@pytest.mark.parametrize("content", [b"not parquet", None])
def test_a_file_that_is_no_output_is_refused_unchanged_of_parquet_results(
    tmp_path: Path, content: bytes | None
) -> None:
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


def rows(seed: int, dtype: str = "u1") -> npt.NDArray[np.uint8]:
    """Return random expert ids, different for each seed."""
    return np.random.default_rng(seed).integers(0, 200, (seed + 1, 2, 3)).astype(dtype)


def saved(path: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """Return all arrays of an archive."""
    with np.load(path) as archive:
        return dict(archive)


def test_arrays_are_read_back_with_numpy(tmp_path: Path) -> None:
    """Arrays keep values, shape and dtype, with one or two bytes per id, with or without rows. No folder is left."""
    path = tmp_path / "r.npz"
    arrays = {"0": rows(3), "1": rows(4, "<u2"), "2.1": np.zeros((0, 2, 3), np.uint8)}

    with RowsFile(path) as file:
        for key, array in arrays.items():
            file.append(key, array)

    found = saved(path)
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        assert found[key].dtype == array.dtype
        np.testing.assert_array_equal(found[key], array)
    assert list(tmp_path.iterdir()) == [path]


def test_later_runs_keep_the_arrays_of_earlier_runs(tmp_path: Path) -> None:
    """A later run keeps the arrays of earlier runs. An array with an existing key replaces the old array."""
    path = tmp_path / "r.npz"
    with RowsFile(path) as file:
        file.append("0", rows(1))
        file.append("1", rows(2))
    with RowsFile(path) as file:
        assert "0" in file
        assert "2" not in file
        file.append("2", rows(3))
    with RowsFile(path) as file:
        file.append("1", rows(5))

    found = saved(path)
    assert found.keys() == {"0", "1", "2"}
    np.testing.assert_array_equal(found["1"], rows(5))
    np.testing.assert_array_equal(found["2"], rows(3))


def test_a_crash_loses_only_the_array_being_written(tmp_path: Path) -> None:
    """After a crash, each array that was added is complete, and an unfinished array is absent."""
    crashed = RowsFile(tmp_path / "r.npz")
    for seed in range(3):
        crashed.append(str(seed), rows(seed))
    (tmp_path / "r.npz.partial" / "draft").write_bytes(b"half of an array")
    with RowsFile(tmp_path / "r.npz") as recovered:
        assert [key for key in ("0", "1", "2", "3") if key in recovered] == ["0", "1", "2"]
        recovered.append("9", rows(9))

    found = saved(tmp_path / "r.npz")
    assert sorted(found) == ["0", "1", "2", "9"]
    for key in found:
        np.testing.assert_array_equal(found[key], rows(int(key)))
    assert list(tmp_path.iterdir()) == [tmp_path / "r.npz"]


def test_a_crash_while_arrays_move_loses_no_array(tmp_path: Path) -> None:
    """The archive is replaced atomically. Until then, the old archive and the new files both exist."""
    path = tmp_path / "r.npz"
    with RowsFile(path) as file:
        file.append("0", rows(1))
    RowsFile(path).append("1", rows(2))
    (tmp_path / "r.npz.tmp").write_bytes(b"half of an archive")
    with RowsFile(path) as file:
        assert ("0" in file, "1" in file) == (True, True)

    assert sorted(saved(path)) == ["0", "1"]


def test_a_run_without_rows_makes_no_file(tmp_path: Path) -> None:
    """A run without rows leaves no .npz and no folder."""
    with RowsFile(tmp_path / "r.npz"):
        pass

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_npz_is_refused_unchanged(tmp_path: Path) -> None:
    """A file that is not an .npz archive is named in the error and stays unchanged."""
    path = tmp_path / "r.npz"
    path.write_bytes(b"something else")

    with pytest.raises(CommandFailed, match=r"is not an \.npz file"):
        RowsFile(path)
    assert path.read_bytes() == b"something else"
