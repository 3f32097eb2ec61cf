"""The command that installs an extra."""

from pathlib import Path

import pytest

from rollbus.schemas.options import pip_install

FOLDER = '{"url": "file:///a%20b/rollbus", "dir_info": {}}'
EDITABLE = '{"url": "file:///src", "dir_info": {"editable": true}}'
WHEEL = '{"url": "https://x/rollbus-1.whl", "archive_info": {}}'
COMMIT = '{"url": "https://x/rollbus.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}'


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'rollbus[data]'"),
        ("{", "pip install 'rollbus[data]'"),
        (FOLDER, "pip install '/a b/rollbus[data]'"),
        (EDITABLE, "pip install -e '/src[data]'"),
        (WHEEL, "pip install 'rollbus[data] @ https://x/rollbus-1.whl'"),
        (COMMIT, "pip install 'rollbus[data] @ git+https://x/rollbus.git@c0ffee'"),
    ],
)
def test_an_extra_is_installed_in_the_way_of_this_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: str | None, command: str
) -> None:
    """The command names the source tree, wheel or commit from which rollbus was installed, or else only its name."""
    info = tmp_path / "rollbus-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: rollbus\nVersion: 1\n")
    if origin is not None:
        (info / "direct_url.json").write_text(origin)
    monkeypatch.syspath_prepend(tmp_path)

    assert pip_install("data") == command
