"""The verdicts of `rollbus prove`: four words, numbers with limits, and the reason of each limit. This module is pure.

Two computations of one model never round equally, so a limit is a matter of degree. It is the larger of a table by
dtype and three times the floor: what the same engine differs from itself, for example in another batch.
"""

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from ....bus.protocol.fleet.canary import LOOSE_CHOICES


class Verdict(enum.StrEnum):
    """The verdict of a finding, a stage or a whole run."""

    OK = "ok"
    """Measured, and within the limits."""
    LOOK = "look"
    """Above a limit, or not covered by what was measured. A person must look at it."""
    WRONG = "wrong"
    """Far above a limit, or a result differs that must be equal."""
    NOT_RUN = "not run"
    """Not measured. The reason is stated."""


_ORDER: Final = (Verdict.NOT_RUN, Verdict.OK, Verdict.LOOK, Verdict.WRONG)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe verdict. `not run` counts only if nothing ran."""
    return max(verdicts, key=_ORDER.index, default=Verdict.NOT_RUN)


class Limit(NamedTuple):
    """A limit for a number, with its reason."""

    value: float
    why: str


class Number(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A measured number."""

    name: str
    value: float
    unit: str = ""
    floor: float | None = None
    """The same number for the engine against itself. None: not measured."""
    limit: float | None = None
    """None: the number has no limit."""
    why: str = ""
    """Reason of the limit."""

    def __post_init__(self) -> None:
        """Replace a number that JSON does not have by the largest one."""
        for name in ("value", "floor", "limit"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                msgspec.structs.force_setattr(self, name, math.copysign(LARGEST, number))


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One statement of a stage."""

    verdict: Verdict
    what: str
    """The statement, as one line."""
    numbers: tuple[Number, ...] = ()
    causes: tuple[str, ...] = ()
    """Likely causes, the most likely first."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one phase of a stage."""

    findings: tuple[Finding, ...]
    headline: str = ""
    """The most important number in a few words, for the table."""
    details: Mapping[str, Any] = {}
    """More for the JSON and the picture: values of JSON only."""

    @property
    def verdict(self) -> Verdict:
        """The most severe verdict of the findings."""
        return worst(finding.verdict for finding in self.findings)

    def joined(self, later: "Outcome") -> "Outcome":
        """Return the outcome of both phases."""
        headline, details = later.headline or self.headline, {**self.details, **later.details}
        return Outcome(findings=(*self.findings, *later.findings), headline=headline, details=details)


LARGEST: Final = 1e30
"""Stands for infinity, which JSON does not have, and for NaN."""
FLOORS: Final = 3.0
"""A limit is at least this many times the floor: a maximum over some hundred tokens varies by a factor of two."""
FLOOR_MOST: Final = 10.0
"""A floor counts up to this many times the table: an engine that differs more from itself is wrong, not noisy."""
WRONG_FROM: Final = 3.0
"""A number up to this many times its limit is `look`, because no table fits every model. A larger one is `wrong`."""

OTHERS: Final = 1 - LOOSE_CHOICES
TABLE: Final[Mapping[str, Mapping[str, float]]] = {
    # Two sums in another order differ by some units of the last place, which is 1.2e-7 of the largest term. Logits of
    # models are below 100, so some 1e-5; layers multiply it. Tiny models have a p99 of 2e-6.
    "float32": {"k3": 1e-8, "p99": 2e-4, "largest": 5e-3, "gap": 1e-4, "other experts": 0.005},
    # The last place of bfloat16 is 0.8 % and of float16 0.1 % of a hidden value. Published comparisons of vLLM with
    # Hugging Face have a k3 of 1e-4 to 1e-3, and single tokens that differ by 0.5.
    "bfloat16": {"k3": 2e-3, "p99": 0.25, "largest": 1.0, "gap": 0.1, "other experts": OTHERS},
    "float16": {"k3": 5e-4, "p99": 0.1, "largest": 0.5, "gap": 0.02, "other experts": OTHERS},
    # Quantized kernels round each input too.
    "quantized": {"k3": 5e-3, "p99": 0.5, "largest": 2.0, "gap": 0.2, "other experts": OTHERS},
}
"""Limits by dtype of the engine. `k3`: mean of the estimate k3 of the KL divergence, in nats. `p99` and `largest`:
difference of log probabilities of one token. `gap`: distance of two experts in the router's logits that is a tie.
`other experts`: share of the choices that differ between two runs, in which only ties can differ."""


def limit_of(figure: str, dtype: str, floor: float | None = None) -> Limit:
    """Return the limit of a figure of `TABLE`.

    Args:
        dtype: dtype of the engine. An unknown one counts as quantized.
        floor: the figure for the engine against itself.
    """
    row = dtype if dtype in TABLE else "quantized"
    table = TABLE[row][figure]
    floor = None if floor is None else min(floor, FLOOR_MOST * table)
    if floor is not None and FLOORS * floor > table:
        return Limit(FLOORS * floor, f"{FLOORS:g} times what the engine differs from itself ({floor:.2g})")
    return Limit(table, f"the table for {row}")


def limited(figure: str, value: float, dtype: str, floor: float | None = None) -> Number:
    """Return a number with its limit of `TABLE`."""
    limit = limit_of(figure, dtype, floor)
    unit = "" if figure == "other experts" else "nats"
    return Number(name=figure, value=value, unit=unit, floor=floor, limit=limit.value, why=limit.why)


def judge(value: float, limit: float) -> Verdict:
    """Return the verdict on a number. NaN is `wrong`."""
    if value <= limit:
        return Verdict.OK
    return Verdict.LOOK if value <= WRONG_FROM * limit else Verdict.WRONG


def measured(what: str, *numbers: Number, mild: str = "") -> Finding:
    """Return the finding for numbers with limits: the worst verdict, and as text the first number that has it.

    Args:
        mild: name of a number that is at most `look`.
    """
    verdicts = [Verdict.OK if number.limit is None else judge(number.value, number.limit) for number in numbers]
    verdicts = [
        min(verdict, Verdict.LOOK, key=_ORDER.index) if number.name == mild else verdict
        for verdict, number in zip(verdicts, numbers, strict=True)
    ]
    verdict = worst(verdicts)
    shown = numbers[verdicts.index(verdict)]
    unit, sign = f" {shown.unit}" * bool(shown.unit), "<=" if verdict is Verdict.OK else ">"
    text = f"{what}: {shown.name} {shown.value:.3g} {sign} {shown.limit or 0.0:.3g}{unit} ({shown.why})"
    return Finding(verdict=verdict, what=text, numbers=numbers)
