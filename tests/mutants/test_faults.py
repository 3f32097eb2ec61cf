"""The planted faults fit the code and the tests of this checkout. `python -m tests.mutants` plants them."""

from tests.mutants.__main__ import ROOT, read_faults


def test_each_fault_fits_its_file_once() -> None:
    """The old text of each fault occurs once in its file, and its tests exist: whoever moves code moves its faults."""
    wrong = {
        fault.name: count for fault in read_faults() if (count := (ROOT / fault.file).read_text().count(fault.old)) != 1
    }
    tests = {test for fault in read_faults() for test in fault.tests}
    missing = [
        test
        for test in sorted(tests)
        for path, _, name in [test.partition("::")]
        if not (ROOT / path).exists() or f"def {name}(" not in ((ROOT / path).read_text() if name else "def (")
    ]

    assert wrong == {}
    assert missing == []
    assert len(read_faults()) >= 60
