"""Write the tables of docs/gpu.md from the files in docs/gpu: `python -m tests.prove.gpu_page`.

Each file is the JSON of a run of `rollbus prove`. Whoever has a device adds one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollbus.frontend.cli.prove.command import STAGES
from rollbus.frontend.cli.prove.report import Report
from rollbus.frontend.cli.prove.verdicts import Verdict

DOC = Path(__file__).parents[2] / "docs" / "gpu.md"
RESULTS = DOC.parent / "gpu"
TABLE = re.compile(r"<!-- (seen|open) -->\n.*?<!-- end -->", re.DOTALL)
MAX_REASON_CHARS = 220
"""Characters of a reason on the page. The file has all of it."""


class Risk(NamedTuple):
    """A part that a GPU can break and no CPU can show."""

    what: str
    run: str
    """Options of `rollbus prove` that run it."""
    stage: str
    """The stage that shows it."""
    is_shown: Callable[[Report], bool]
    """True if the run had this part."""


def argument(name: str, least: Any = True) -> Callable[[Report], bool]:
    """Return a condition: the engine argument has at least this value."""
    return lambda report: (engine_args(report).get(name) or 0) >= least


def engine_args(report: Report) -> Mapping[str, Any]:
    """Return the engine arguments of a run."""
    given: Mapping[str, Any] = report.options.get("engine_args") or {}
    return given


def says(stage: str, text: str) -> Callable[[Report], bool]:
    """Return a condition: a finding of the stage that ran has this text."""
    return lambda report: any(
        text in finding.what and finding.verdict is not Verdict.NOT_RUN
        for one in report.stages
        if one.stage == stage
        for finding in one.findings
    )


def on_gpu(report: Report) -> bool:
    """Return True if the engine computed on a GPU."""
    return report.engine == "vllm" and " cpu-" not in report.signature


RISKS = (
    Risk("CUDA graphs with capture, against eager and prefill", "", "agreement", lambda report: not
         engine_args(report).get("enforce_eager")),
    Risk("rows of fused MoE kernels", "", "routing", lambda _: True),
    Risk("rows with tensor parallelism", "`tensor_parallel_size`: 2", "routing", argument("tensor_parallel_size", 2)),
    Risk("answers with pipeline parallelism (vLLM returns no rows)", "`pipeline_parallel_size`: 2", "agreement",
         argument("pipeline_parallel_size", 2)),
    Risk("FP8 weights and their scales after an update", "an FP8 checkpoint, or `quantization`: fp8", "updates",
         lambda report: "fp8" in f"{report.signature} {engine_args(report)}".lower()),
    Risk("a checkpoint loaded on a GPU, its pause and its verification", "", "updates",
         says("updates", "by path")),
    Risk("weights over NCCL", "`weight_transfer_config`, and a trainer's process", "updates",
         says("updates", "by the transfer engine")),
    Risk("prefill and decode over NIXL, with rows", "`--kv-transfer-config` of NIXL, two GPUs", "survival",
         lambda report: says("survival", "prefill and decode")(report) and "Nixl" in str(report.options)),
    Risk("sleep and wake at both levels", "`enable_sleep_mode`", "survival", says("survival", "sleep at level")),
    Risk("adapters on a model with experts", "`enable_lora`", "survival",
         says("survival", "adapter loaded again")),
    Risk("data parallelism of a model with experts (rejected today)", "`data_parallel_size`: 2", "agreement",
         argument("data_parallel_size", 2)),
    Risk("MIG devices", "`CUDA_VISIBLE_DEVICES` of a MIG device", "speed",
         lambda report: "MIG" in f"{report.device} {report.signature}"),
    Risk("what the transport costs beside a fast engine", "", "speed",
         says("speed", "engine")),
)  # fmt: skip


def ran(report: Report, stage: str) -> bool:
    """Return True if a stage of the run ran."""
    return any(one.stage == stage and one.verdict is not Verdict.NOT_RUN for one in report.stages)


def read_results(folder: Path) -> dict[str, Report]:
    """Return the runs by the names of their files."""
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=Report) for file in sorted(folder.glob("*.json"))}


def with_tables(text: str, results: Mapping[str, Report]) -> str:
    """Return the page with its tables regenerated."""
    tables = {"seen": seen(results), "open": still_open(results)}
    return TABLE.sub(lambda found: f"<!-- {found[1]} -->\n{tables[found[1]]}\n<!-- end -->", text)


def seen(results: Mapping[str, Report]) -> str:
    """Return a table with a row for each run, and below it what is not `ok`, with the reason."""
    if not results:
        return "No run is recorded yet."
    names = [stage.name for stage in (make() for make in STAGES)]
    rows: list[Sequence[str]] = [("run", "device", "engine", "model", "date", *names)]
    notes = []
    for name, report in results.items():
        stages = {stage.stage: stage for stage in report.stages}
        cells = [
            f"**{stages[one].verdict}** {stages[one].headline}".removesuffix(" -") if one in stages else ""
            for one in names
        ]
        engine = f"{report.engine} {report.engine_version}, {report.dtype}"
        model = f"{report.model} ({report.architecture})"
        rows.append((f"[{name}](gpu/{name}.json)", report.device, engine, model, report.created[:10], *cells))
        for stage in report.stages:
            for finding in stage.findings:
                if finding.verdict is not Verdict.OK:
                    reason = (
                        finding.what if len(finding.what) <= MAX_REASON_CHARS else f"{finding.what[:MAX_REASON_CHARS]}…"
                    )
                    notes.append(f"- {name}, {stage.stage}, {finding.verdict}: {reason}")
    return "\n".join([*markdown(rows), "", *notes]).rstrip()


def still_open(results: Mapping[str, Report]) -> str:
    """Return the table of what a GPU can break, with the runs that had it."""
    rows: list[Sequence[str]] = [("part", "options", "stage", "runs")]
    for risk in RISKS:
        shown = [name for name, one in results.items() if on_gpu(one) and ran(one, risk.stage) and risk.is_shown(one)]
        rows.append((risk.what, risk.run or "-", risk.stage, ", ".join(shown) or "**not seen**"))
    return "\n".join(markdown(rows))


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first row is its head."""
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return [lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]]


if __name__ == "__main__":
    DOC.write_text(with_tables(DOC.read_text(), read_results(RESULTS)))
