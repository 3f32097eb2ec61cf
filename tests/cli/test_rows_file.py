from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from rollbus.frontend.cli.exits import CommandFailed
from rollbus.frontend.cli.generate.results import RowsFile


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
