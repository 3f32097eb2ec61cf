"""Helm itself, as a shared library from the wheel helm-sdkpy, in a process of its own (a Go program takes signals).

    python -m tests.deploy.helm < {"chart": DIR, "values": {...}, "server": URL, ...}

The wheel's Python part asks for Python 3.12, but the library needs no Python. `.ci/deploy-packages` installs it.
"""

import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kube_api import KubeApi, serve_kube_api

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/rollbus"
PACKAGES = Path(os.environ.get("ROLLBUS_DEPLOY_PACKAGES", ROOT / ".make/deploy"))
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
LIBRARY = PACKAGES / f"helm_sdkpy/_lib/linux-{MACHINE}/libhelm_sdkpy.so"
RELEASE, NAMESPACE = "rl", "train"

needs_helm = pytest.mark.skipif(not LIBRARY.exists(), reason=f"no Helm in {PACKAGES}: run `make test-deploy`")


class Refused(Exception):
    """Helm's error."""


def render(*values: dict[str, Any], api: KubeApi | None = None) -> list[dict[str, Any]]:
    """Return the objects of the chart with these values; the later win, as for `--values`."""
    if api is None:
        with serve_kube_api() as own:
            return render(*values, api=own)
    merged: dict[str, Any] = {}
    for one in values:
        merge(merged, one)
    api.release = None
    order = {"chart": str(CHART), "values": merged, "server": api.url}
    run = [sys.executable, "-m", "tests.deploy.helm"]
    done = subprocess.run(run, input=json.dumps(order), capture_output=True, text=True, cwd=ROOT, check=False)
    if api.release is None:
        raise Refused(done.stdout + done.stderr)
    hooks = [hook["manifest"] for hook in api.release.get("hooks") or ()]
    found = [one for text in [api.release["manifest"], *hooks] for one in yaml.safe_load_all(text)]
    return [one for one in found if one is not None]


def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    """Merge as Helm does: maps by key, all else is replaced."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = json.loads(json.dumps(value))


def select(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """Return the only object of a kind whose name begins so."""
    found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"].startswith(name)]
    assert len(found) == 1, [one["metadata"]["name"] for one in found]
    return found[0]


def main() -> int:
    """Install the chart that stdin describes; print Helm's error."""
    order = json.load(sys.stdin)
    library = ctypes.CDLL(str(LIBRARY))
    library.helm_sdkpy_last_error.restype = ctypes.c_char_p
    cluster = {"name": "c", "cluster": {"server": order["server"]}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [cluster],
        "contexts": [context],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config | {"users": [{"name": "u", "user": {"token": "t"}}]}, file)
        file.flush()
        handle = ctypes.c_ulonglong()
        code = library.helm_sdkpy_config_create(
            NAMESPACE.encode(), file.name.encode(), b"", b"{}", ctypes.byref(handle)
        )
        result = ctypes.c_char_p()
        if code == 0:
            options = {"wait": False, "timeout_seconds": 60, "server_side_apply": "false"}
            options |= {"disable_openapi_validation": True}
            values, chart = json.dumps(order["values"]).encode(), order["chart"].encode()
            code = library.helm_sdkpy_install(
                handle, RELEASE.encode(), chart, values, b"", json.dumps(options).encode(), ctypes.byref(result)
            )
        sys.stdout.write((library.helm_sdkpy_last_error() or b"").decode())
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
