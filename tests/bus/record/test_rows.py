"""Rows of a record: each `Generation` comes back equal, and a torn, doubled or older file gives what it has."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollbus import GenerateRequest, Generation, InvalidRequest, RunRecorder, SampleKey, SamplingParams, read_record
from rollbus.bus.client import record_writer as writer
from rollbus.bus.client.record_writer import KINDS, sample_row, schema_of
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode, request_error

SAMPLING = SamplingParams(max_tokens=4, logit_bias={7: 1.5}, stop_token_ids=[9], n=2, extra={"guided": {"a": [1]}})


def generation(number: int = 0, child: int = 0, *, num_tokens: int = 4, **fields: Any) -> Generation:
    """Return a sample with a value in each field."""
    request = GenerateRequest(prompt_token_ids=[3, 1, number], sampling=SAMPLING, model="policy", priority=-1)
    values: dict[str, Any] = {
        "request": request,
        "request_id": request.request_id,
        "key": SampleKey("c0ffee", number, child),
        "child": child,
        "prompt_len": 3,
        "token_ids": np.arange(num_tokens, dtype="i4"),
        "logprobs": np.array([-0.5, -np.inf, -2.0, 0.0][:num_tokens], "f4"),
        "weight_versions": np.full(num_tokens, 5, "i4"),
        "lora_versions": np.full(num_tokens, 2, "i4"),
        "routed_experts": np.arange(12, dtype="u1").reshape(6, 1, 2),
        "start": 1,
        "finish_reason": FinishReason.STOP,
        "stop_reason": 9,
        "kv_version_spans": ((0, 4), (3, 5)),
        "kv_mixed": np.array([True, False] * 2)[:num_tokens],
        "top_token_ids": np.arange(2 * num_tokens, dtype="i4").reshape(num_tokens, 2),
        "top_logprobs": np.zeros((num_tokens, 2), "f4"),
        "prompt_logprobs": np.array([-1.0, -2.0], "f4"),
        "cached_tokens": 2,
        "attempts": 3,
        "exact": False,
        "worker_ids": ("a", "b"),
        "model": "policy",
        "parts": 2,
        "opened_at": 1e9 + number,
        "ended_at": 1e9 + number + 0.5,
    }
    return Generation(**{**values, **fields})


def assert_equal(found: Generation, expected: Generation, *, without: tuple[str, ...] = ()) -> None:
    """Assert that all fields are equal, with their dtypes."""
    for field in dataclasses.fields(Generation):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name in without:
            continue
        if field.name == "request":
            np.testing.assert_array_equal(one.prompt_token_ids, other.prompt_token_ids)
            assert one.sampling == other.sampling
            names = set(GenerateRequest.__struct_fields__) - {"prompt_token_ids", "sampling"}
            assert {name: getattr(one, name) for name in names} == {name: getattr(other, name) for name in names}
        elif field.name == "siblings":
            for sibling, of in zip(one, other, strict=True):
                assert_equal(sibling, of)
        elif field.name == "error":
            assert (one and (type(one), one.code, str(one))) == (other and (type(other), other.code, str(other)))
        elif isinstance(other, np.ndarray):
            np.testing.assert_array_equal(one, other)
            assert (one.dtype, one.flags.writeable) == (other.dtype, True), field.name
        else:
            assert one == other, field.name


def write(folder: Path, *generations: Generation, **options: Any) -> None:
    """Record these samples and close the record."""
    with RunRecorder(folder, **options) as recorder:
        for each in generations:
            recorder.add(each, newest_version=7)
    assert recorder.error is None


def test_a_sample_comes_back_equal(tmp_path: Path) -> None:
    """All fields of a sample, its siblings and a failed request come back equal, from parquet."""
    error = request_error(
        ErrorCode.INVALID_REQUEST, "", field="lora", problem="is unknown", allowed="x", request_id="r"
    )
    failed = generation(1, num_tokens=0, error=error, finish_reason=FinishReason.ERROR, kv_mixed=None)
    whole = generation(0, siblings=(generation(0, 1),))
    write(tmp_path, whole, failed, experts=True)

    record = read_record(tmp_path)
    first, second = record
    # A sibling shares the request of its first sample.
    shared = dataclasses.replace(whole.siblings[0], request=whole.request)
    assert_equal(first, dataclasses.replace(whole, siblings=(shared,)))
    assert first.siblings[0].request is first.request
    assert_equal(second, failed)
    assert record.problems == []
    np.testing.assert_array_equal(record.column("lag"), [5, 5, np.nan])
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet", ".json"}


def test_the_experts_are_left_out_by_default(tmp_path: Path) -> None:
    """Without the option, a record has no experts and no file for them."""
    write(tmp_path, generation())
    [found] = read_record(tmp_path)
    assert found.routed_experts is None
    assert not list(tmp_path.glob("experts-*"))


def test_a_row_has_the_values_at_the_time_of_the_result(tmp_path: Path) -> None:
    """A caller may change its arrays immediately: the record has copies."""
    expected, changed = generation(), generation()
    with RunRecorder(tmp_path, experts=True) as recorder:
        recorder.add(changed)
        for array in (changed.token_ids, changed.logprobs, changed.routed_experts):
            array[...] = 0
    [found] = read_record(tmp_path)
    assert_equal(found, expected, without=("request", "request_id"))


def test_scores_come_later_and_from_several_writers(tmp_path: Path) -> None:
    """Scores are joined by key, also those of a later writer; of doubles the later value counts."""
    first, second = generation(0), generation(1)
    with RunRecorder(tmp_path) as recorder:
        recorder.add(first)
        recorder.score(first, reward=1, format=0.5)
        recorder.add(second)
        recorder.score(first, advantage=-0.25)
    with RunRecorder(tmp_path) as recorder:
        recorder.score(first, reward=2, length=3.0)
    record = read_record(tmp_path)
    score = record.score_of(first)
    assert (score.reward, score.advantage, score.metrics) == (2.0, -0.25, {"format": 0.5, "length": 3.0})
    assert record.score_of(second).reward is None
    np.testing.assert_array_equal(record.column("reward"), [2.0, np.nan])


def open_part(folder: Path, *generations: Generation) -> tuple[Path, list[int]]:
    """Write a part as a killed process leaves it, one batch for each sample. Return it with the ends of its batches."""
    parts = writer._Parts(folder, "samples", "killed")
    ends = []
    for each in generations:
        parts.write([sample_row(each, None)])
        [path] = folder.glob("samples-*.arrow")
        ends.append(path.stat().st_size)
    return path, ends


@pytest.mark.parametrize("num_torn", [0, 10, 300])
def test_a_torn_part_gives_its_whole_batches(tmp_path: Path, num_torn: int) -> None:
    """Of a part that a crash has cut, the whole batches are read, and the bytes after them are counted."""
    path, ends = open_part(tmp_path, *(generation(number) for number in range(3)))
    path.write_bytes(path.read_bytes()[: ends[1] + num_torn])

    record = read_record(tmp_path)
    assert [each.key for each in record] == [SampleKey("c0ffee", 0, 0), SampleKey("c0ffee", 1, 0)]
    assert record.torn_bytes == num_torn
    assert record.problems == [f"{path.name}: {num_torn} bytes after the last whole batch are not readable"][:num_torn]


def test_every_cut_of_a_part_is_readable(tmp_path: Path) -> None:
    """A part that is cut at any byte raises no error, and never gives a broken sample."""
    path, [size] = open_part(tmp_path, generation())
    data = path.read_bytes()
    for cut in range(0, size, 37):
        path.write_bytes(data[:cut])
        record = read_record(tmp_path)
        assert list(record) == []
        assert record.torn_bytes <= cut
    path.write_bytes(data)
    assert len(list(read_record(tmp_path))) == 1


def test_a_part_with_both_files_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash at the end of a conversion leaves the part and its parquet file: its samples count once."""
    with monkeypatch.context() as patches:
        patches.setattr(Path, "unlink", lambda *_: None)
        write(tmp_path, generation(0), generation(1))
    assert len(list(tmp_path.glob("samples-*"))) == 2
    assert len(list(read_record(tmp_path))) == 2


def test_the_last_double_counts(tmp_path: Path) -> None:
    """If two rows have the same key, the last complete one counts."""
    write(tmp_path, generation(0, stop_reason=1), generation(0, stop_reason=2))
    [found] = read_record(tmp_path)
    assert found.stop_reason == 2


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    """A record without a later column, or with an unknown one, is readable."""
    write(tmp_path, generation())
    [part] = tmp_path.glob("samples-*.parquet")
    table = pq.read_table(part).drop_columns(["cached_tokens", "kv_mixed", "lag"]).append_column("new", pa.array([1]))
    pq.write_table(table, part)
    [found] = read_record(tmp_path)
    assert (found.cached_tokens, found.kv_mixed) == (None, None)
    np.testing.assert_array_equal(found.token_ids, np.arange(4))


def test_every_field_of_a_generation_is_recorded() -> None:
    """A new field of `Generation` or of the scores needs a column."""
    columns = {name for kind in KINDS for name in schema_of(kind).names}
    elsewhere = {"key", "siblings", "sampling_mask"}
    assert {field.name for field in dataclasses.fields(Generation)} - columns == elsewhere


def test_a_folder_without_a_record_is_an_error(tmp_path: Path) -> None:
    """The error names the folder."""
    with pytest.raises(InvalidRequest, match=r"folder is '.*', which has no record of a run"):
        read_record(tmp_path)


def test_scores_must_be_numbers_of_sent_samples(tmp_path: Path) -> None:
    """The error names the field; the record continues."""
    with RunRecorder(tmp_path) as recorder:
        with pytest.raises(InvalidRequest, match="reward is 'high'; allowed: a number"):
            recorder.score(generation(), reward="high")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="generation was not sent"):
            recorder.score(generation(key=None), reward=1.0)
        recorder.score(generation(), reward=1.0)


def test_the_file_of_the_writer_says_whether_the_record_is_complete(tmp_path: Path) -> None:
    """An open record is a problem, and a closed one is not; the file keeps its size."""
    recorder = RunRecorder(tmp_path)
    [file] = tmp_path.glob("writer-*.json")
    size = file.stat().st_size
    assert "still writing, or was killed" in read_record(tmp_path).problems[0]
    recorder.close()
    assert file.stat().st_size == size
    assert json.loads(file.read_text())["state"] == "closed"
    assert msgspec.json.decode(file.read_bytes(), type=writer.WriterFile).state == "closed"
    assert read_record(tmp_path).problems == []
