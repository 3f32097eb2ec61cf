"""Time limits of tests are long and scalable, and one module defines them."""

import re
import runpy

import pytest

from tests.support import patience
from tests.support.processes import ROOT

LIMIT = re.compile(r"asyncio\.(?:timeout\(|wait_for\(.*, )([0-9.]+)\)")
EXPECTED_TO_RUN_OUT_S = 1.0
"""A test with a shorter limit expects the timeout."""


@pytest.mark.parametrize(("factor", "scale"), [("", 1.0), ("1", 1.0), ("2.5", 2.5)])
def test_limits_scale_with_the_environment(monkeypatch: pytest.MonkeyPatch, factor: str, scale: float) -> None:
    """`$ROLLBUS_TEST_PATIENCE` multiplies each limit."""
    monkeypatch.delenv("ROLLBUS_TEST_PATIENCE", raising=False)
    plain = runpy.run_path(patience.__file__)
    monkeypatch.setenv("ROLLBUS_TEST_PATIENCE", factor)
    scaled = runpy.run_path(patience.__file__)

    for name in patience.__all__:
        if name not in {"patient", "UNHURRIED_LEASE_S"}:
            assert scaled[name] == scale * plain[name]
    assert scaled["patient"](4.0) == scale * 4.0


def test_each_limit_comes_from_the_patience_module() -> None:
    """Each limit that a busy machine could exceed comes from `tests/support/patience.py`."""
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for match in LIMIT.finditer(path.read_text())
        if float(match[1]) >= EXPECTED_TO_RUN_OUT_S
    ]

    assert found == []
