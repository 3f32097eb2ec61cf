"""docs/gpu.md has what the files in docs/gpu say."""

import msgspec

from rollbus.frontend.cli.prove.report import Report, StageReport
from rollbus.frontend.cli.prove.verdicts import Finding, Verdict
from tests.prove.gpu_page import DOC, RESULTS, RISKS, read_results, seen, still_open, with_tables


def report(stage: str, what: str, verdict: Verdict = Verdict.OK, **fields: object) -> Report:
    """Return a run with one stage on a GPU."""
    given = {
        "verdict": verdict, "created": "2026-01-01T00:00:00+00:00", "rollbus": "0.1.0", "commit": None,
        "device": "NVIDIA H100, 81559 MiB, 570.1", "machine": "m", "engine": "vllm", "engine_version": "0.33.0",
        "signature": "cuda tp1 bfloat16", "model": "m", "architecture": "A", "dtype": "bfloat16",
        "logprobs_mode": "raw_logprobs", "reference": None, "workers": 1, "is_own": True, "seed": 0, "minutes": 1.0,
        "options": {"engine_args": {}}, **fields,
    }  # fmt: skip
    finding = Finding(verdict=verdict, what=what)
    one = StageReport(stage=stage, bar="b", verdict=verdict, headline="1", seconds=1.0, findings=(finding,))
    return msgspec.convert(given | {"stages": (one,)}, Report)


def lines_of(table: str, run: str) -> set[str]:
    """Return the first cells of the rows that name the run."""
    return {line.split("|")[1].strip() for line in table.splitlines() if line.rstrip(" |").endswith(f" {run}")}


def test_the_page_has_the_files_of_its_directory() -> None:
    """The tables are those that `python -m tests.prove.gpu_page` writes."""
    assert with_tables(DOC.read_text(), read_results(RESULTS)) == DOC.read_text()


def test_a_part_is_seen_only_by_a_run_with_its_options_and_its_stage() -> None:
    """A run counts for a part if it had the options, its stage ran, and it ran on a GPU where that matters."""
    parallel = report("routing", "rows", options={"engine_args": {"tensor_parallel_size": 2}})
    refused = report("survival", "sleep at level 1: none", Verdict.NOT_RUN)
    slept = report("survival", "sleep at level 1 and wake: 512 of 512 tokens compared")

    table = still_open({"parallel": parallel, "refused": refused, "slept": slept})

    assert lines_of(table, "parallel") == {"rows of fused MoE kernels", "rows with tensor parallelism"}
    assert lines_of(table, "slept") == {"sleep and wake at both levels"}
    assert "refused" not in table
    assert table.count("**not seen**") == len(RISKS) - 3


def test_what_is_not_ok_is_on_the_page_with_its_reason() -> None:
    """A stage that did not run states its reason below the table."""
    table = seen({"cpu": report("speed", "engine: too | few", Verdict.NOT_RUN)})

    assert "- cpu, speed, not run: engine: too | few" in table
    assert "**not run** 1" in table
