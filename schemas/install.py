"""The command that installs an extra of rollbus, in the way in which this rollbus was installed."""

from urllib.parse import unquote, urlsplit

__all__ = ["pip_install"]


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this installation, for example `pip install 'rollbus[data]'`.

    If rollbus was not installed from an index, `direct_url.json` (PEP 610) has its origin.
    """
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    package = f"rollbus[{extra}]"
    try:
        origin = json.loads(distribution("rollbus").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        origin = {}
    url, vcs, folder = origin.get("url"), origin.get("vcs_info"), origin.get("dir_info")
    if not url:
        return f"pip install '{package}'"
    if folder is not None:
        editable = "-e " if folder.get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    if vcs is not None:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install '{package} @ {url}'"
