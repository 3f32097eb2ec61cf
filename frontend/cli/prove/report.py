"""The result of `rollbus prove` in three forms: a table, a JSON object of one shape, and a picture as SVG.

The JSON has a version, `v`. Fields are only added, so that pages made from files of many releases stay readable.
"""

from collections.abc import Mapping
from html import escape
from typing import Any, Final, Literal

import msgspec

from ..tables import table_text
from .verdicts import Finding, Verdict


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one stage."""

    stage: str
    bar: str
    """What must hold for `ok`."""
    verdict: Verdict
    headline: str
    """The most important number in a few words."""
    seconds: float
    findings: tuple[Finding, ...] = ()
    details: Mapping[str, Any] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of one run."""

    v: Literal[1] = 1
    """Version of this shape."""
    verdict: Verdict
    """The most severe verdict of the stages."""
    created: str
    """Time at which the run began, ISO 8601 with UTC."""
    rollbus: str
    commit: str | None
    """Commit of the checkout that ran; None: an installed package."""
    device: str
    """Accelerators of this machine with their driver, or its CPU."""
    machine: str
    engine: str
    """`vllm` or `synthetic`."""
    engine_version: str
    signature: str
    """Device, parallelism, dtype and release of the workers' engines."""
    model: str
    architecture: str | None
    """Class of the model in its config.json."""
    dtype: str
    """Dtype of the engines."""
    logprobs_mode: str
    """`raw_logprobs`, or `processed_logprobs` if the fleet applies the sampling parameters to them."""
    reference: str | None
    """Device and dtype of the forward passes of transformers; None: there were none."""
    workers: int
    is_own: bool
    """True: the command started the fleet."""
    seed: int
    minutes: float
    options: Mapping[str, Any]
    """Engine arguments and other options that change results."""
    stages: tuple[StageReport, ...]


def table(report: Report, width: int | None = None) -> str:
    """Return the report as text: a heading, one row for each stage, and below it what a person must read."""
    rows = [
        (stage.stage, str(stage.verdict), stage.headline, stage.bar if stage.verdict is not Verdict.NOT_RUN else "")
        for stage in report.stages
    ]
    release = f"rollbus {report.rollbus}" + (f" ({report.commit})" if report.commit else "")
    lines = [
        f"{report.model} ({report.architecture or 'unknown architecture'}, {report.dtype}) on {report.device}",
        f"{report.engine} {report.engine_version} with {report.logprobs_mode}, {release}",
        f"reference: {report.reference or 'none'}",
        "",
        table_text(("stage", "verdict", "number", "bar"), rows, width),
        "",
    ]
    for stage in report.stages:
        for finding in stage.findings:
            if finding.verdict is Verdict.OK:
                continue
            lines.append(f"{stage.stage}: {finding.verdict}: {finding.what}")
            lines += [f"    likely cause: {cause}" for cause in finding.causes]
    return "\n".join([*lines, f"verdict: {report.verdict}"])


COLORS: Final = {Verdict.OK: "#1a7f37", Verdict.LOOK: "#9a6700", Verdict.WRONG: "#cf222e", Verdict.NOT_RUN: "#6e7781"}
WIDTH: Final = 860
LINE: Final = 18
MAX_CHARS: Final = 118
"""Characters of a line of small text in the picture."""
MAX_FINDINGS: Final = 8
"""Findings of a stage in the picture. The JSON has all of them."""


def picture(report: Report) -> str:
    """Return the report as an SVG that needs nothing else: a row for each stage, and its numbers as bars."""
    y = 64
    parts: list[str] = []
    for stage in report.stages:
        parts.append(
            f'<rect x="20" y="{y - 15}" width="74" height="21" rx="4" fill="{COLORS[stage.verdict]}"/>'
            + _text(57, y, stage.verdict, "v")
            + _text(106, y, stage.stage, "h")
            + _text(230, y, stage.headline, "h")
        )
        y += LINE + 4
        for finding in stage.findings[:MAX_FINDINGS]:
            for line in (finding.what, *(f"likely cause: {cause}" for cause in finding.causes)):
                parts.append(_text(106, y, line[:MAX_CHARS], "s"))
                y += LINE
            parts += _bars(finding, y)
            y += LINE * sum(number.limit is not None for number in finding.numbers)
        y += LINE
    heading = f"rollbus prove: {report.model} ({report.dtype}) on {report.device}"
    below = f"{report.engine} {report.engine_version}, rollbus {report.rollbus} {report.commit or ''}, {report.created}"
    style = (
        "text{font-family:system-ui,sans-serif;fill:#1f2328}.t{font-size:17px;font-weight:600}.h{font-size:14px;"
        "font-weight:600}.s{font-size:12px}.v{font-size:12px;fill:#fff;text-anchor:middle}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" role="img">'
        f"<title>{escape(heading)}</title><style>{style}</style>"
        f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>'
        f"{_text(20, 24, heading, 't')}{_text(20, 42, below, 's')}{''.join(parts)}</svg>\n"
    )


def _bars(finding: Finding, y: int) -> list[str]:
    """Return a bar for each number with a limit, up to three times the limit. A line marks the limit."""
    parts = []
    for number in finding.numbers:
        if number.limit is None:
            continue
        share = min(number.value / number.limit, 3.0) if number.limit else 3.0
        color = COLORS[finding.verdict]
        parts.append(
            f'<rect x="420" y="{y - 10}" width="300" height="10" fill="#eaeef2"/>'
            f'<rect x="420" y="{y - 10}" width="{max(100 * share, 1):.0f}" height="10" fill="{color}"/>'
            f'<path d="M520 {y - 13}v16" stroke="#1f2328"/>'
            + _text(120, y, f"{number.name}: {number.value:.3g} {number.unit}, limit {number.limit:.3g}", "s")
        )
        y += LINE
    return parts


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{escape(str(text))}</text>'
