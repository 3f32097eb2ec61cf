"""As much of a Kubernetes API as Helm needs to render a chart, and as the users' job needs: discovery and objects.

Helm runs a whole `install` up to its first write, the record of the release, which contains all rendered objects.
"""

import base64
import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = {
    "v1": ["Secret", "ConfigMap", "Service", "ServiceAccount", "Pod", "PersistentVolumeClaim"],
    "apps/v1": ["StatefulSet", "Deployment"],
    "batch/v1": ["Job"],
    "rbac.authorization.k8s.io/v1": ["Role", "RoleBinding"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "autoscaling/v2": ["HorizontalPodAutoscaler"],
    "keda.sh/v1alpha1": ["ScaledObject"],
    "leaderworkerset.x-k8s.io/v1": ["LeaderWorkerSet"],
}


class KubeApi:
    """One API server: its objects by path, and the release that Helm last recorded."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.release: dict[str, Any] | None = None
        self.calls: list[tuple[str, str]] = []
        self.url = ""

    def answer(self, method: str, path: str, body: bytes, kind: str) -> tuple[int, object]:
        """Return status and body of the answer."""
        self.calls.append((method, path))
        if method == "GET":
            return self._read(path)
        if "protobuf" in kind:
            record = base64.b64decode(re.search(rb"H4sI[\w+/]+=*", body)[0])
            self.release = json.loads(gzip.decompress(record))
            return 403, {"kind": "Status", "status": "Failure", "code": 403, "message": "rendered"}
        sent = json.loads(body)
        if method == "POST":
            path = f"{path}/{sent['metadata']['name']}"
            if path in self.objects:
                return 409, {"kind": "Status", "status": "Failure", "reason": "AlreadyExists", "code": 409}
            self.objects[path] = sent
        else:
            now = self.objects[path]
            if sent["metadata"]["resourceVersion"] != now["metadata"]["resourceVersion"]:
                return 409, {"kind": "Status", "status": "Failure", "reason": "Conflict", "code": 409}
            now["data"] |= sent["data"]
        meta = self.objects[path]["metadata"]
        meta["resourceVersion"] = str(int(meta.get("resourceVersion", 0)) + 1)
        return 200, self.objects[path]

    def _read(self, path: str) -> tuple[int, object]:
        if path == "/version":
            return 200, {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            versions = [{"groupVersion": one, "version": one.split("/")[1]} for one in KINDS if "/" in one]
            groups = [
                {"name": one["groupVersion"].split("/")[0], "versions": [one], "preferredVersion": one}
                for one in versions
            ]
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = re.sub("^/apis?/", "", path)
        if version in KINDS:
            resources = [
                {"name": plural(kind), "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": ["get"]}
                for kind in KINDS[version]
            ]
            return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if path in self.objects:
            return 200, self.objects[path]
        if path.endswith("/secrets"):
            return 200, {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []}
        return 404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": path}


def plural(kind: str) -> str:
    """Return the name of a kind in paths."""
    return re.sub("ys$", "ies", f"{kind.lower()}s")


@contextmanager
def serve_kube_api() -> Iterator[KubeApi]:
    """Serve an API without objects."""
    api = KubeApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            kind = self.headers.get("Content-Type") or ""
            code, found = api.answer(self.command, self.path.partition("?")[0], self.rfile.read(size), kind)
            data = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_PATCH = do_GET  # noqa: N815 (names of http.server)

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        api.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()
