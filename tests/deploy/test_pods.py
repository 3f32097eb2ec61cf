"""What the objects of the chart run, read out of the rendered objects, with a real nats-server and real processes."""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.helm import NAMESPACE, ROOT, needs_helm, render, select
from tests.deploy.kube_api import KubeApi, serve_kube_api
from tests.support.nats_server import free_nodes, require_binary
from tests.support.processes import becomes_true

pytestmark = [needs_helm, pytest.mark.slow]

BIN = ROOT / ".venv/bin"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
WORKER = {"name": "w", "engine": "synthetic", "servedModelName": "m", "replicas": 2, "cpu": 1, "memory": "1Gi"}
AUTOSCALING = {"enabled": True, "slots": 4, "max": 2}
VALUES: dict[str, Any] = {
    "nats": {"config": {"cluster": {"enabled": False}, "jetstream": {"fileStore": {"pvc": {"size": "20Gi"}}}}},
    "frontend": {"replicas": 1},
    "fleets": [
        {
            "name": "f",
            "trainers": ["alice"],
            "publishers": [{"name": "pub", "models": ["m"]}],
            "workers": [WORKER | {"autoscaling": AUTOSCALING}],
        }
    ],
}


def secret(api: KubeApi, name: str) -> dict[str, str]:
    """Return the data of a Secret."""
    data = api.objects[f"{SECRETS}/{name}"]["data"]
    return {key: base64.b64decode(text).decode() for key, text in data.items()}


def make_users(api: KubeApi, objects: list[dict[str, Any]], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the job's command with its files, against this API."""
    folder.mkdir(exist_ok=True)
    for name, text in select(objects, "ConfigMap", "rl-make-users")["data"].items():
        (folder / name).write_text(text)
    (folder / "token").write_text("t")
    pod = select(objects, "Job", "rl-make-users")["spec"]["template"]["spec"]
    command = [part.replace("/plan", str(folder)) for part in pod["containers"][0]["command"]]
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "POD_NAMESPACE": NAMESPACE, "HOME": str(folder)}
    assert command[0] == "python3"
    command = [str(BIN / "python"), *command[1:], "--account", str(folder), "--api", api.url]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_job_makes_missing_users_and_changes_no_key(tmp_path: Path) -> None:
    """A second run writes nothing; more workers add keys; a deleted Secret is made again; a lost root is an error."""
    with serve_kube_api() as api:
        objects = render(VALUES)
        assert make_users(api, objects, tmp_path).returncode == 0
        allowed = select(objects, "Role")["rules"][1]["resourceNames"]
        assert {path.removeprefix(f"{SECRETS}/") for path in api.objects} == set(allowed)
        assert secret(api, "rl-f-w-keys").keys() == {"rl-f-w-0.creds", "rl-f-w-1.creds"}
        assert json.loads(secret(api, "rl-f-w-keys")["rl-f-w-1.creds"])["name"] == "rl-f-w-1"
        before = json.dumps(api.objects)
        api.calls.clear()
        assert make_users(api, objects, tmp_path).returncode == 0
        assert {method for method, _ in api.calls} == {"GET"}
        assert json.dumps(api.objects) == before

        kept = secret(api, "rl-f-w-keys")
        more = render(VALUES, {"auth": {"spareWorkers": 2}})
        assert make_users(api, more, tmp_path).returncode == 0
        assert len(secret(api, "rl-f-w-keys")) == 4
        assert kept.items() <= secret(api, "rl-f-w-keys").items()

        old = api.objects.pop(f"{SECRETS}/rl-f-trainers")
        assert make_users(api, more, tmp_path).returncode == 0
        assert api.objects[f"{SECRETS}/rl-f-trainers"]["data"] != old["data"]
        trainer = json.loads(secret(api, "rl-f-trainers")["alice.creds"])
        assert trainer["seed"] not in secret(api, "rl-users")["users.conf"]

        del api.objects[f"{SECRETS}/rl-root"]
        lost = make_users(api, more, tmp_path)
        assert lost.returncode == 1
        assert "the Secret rl-root has no key 'f'" in lost.stderr


def test_a_rotation_makes_users_beside_the_old_and_then_removes_them(tmp_path: Path) -> None:
    """Rotation 2 keeps the users of rotation 1 until keepFrom is 2; other users of the list stay."""

    def names() -> set[str]:
        return {user["name"] for user in json.loads(secret(api, "rl-users")["users.json"])["users"]}

    with serve_kube_api() as api:
        assert make_users(api, render(VALUES), tmp_path).returncode == 0
        first = names()
        assert make_users(api, render(VALUES, {"auth": {"rotation": 2}}), tmp_path).returncode == 0
        second = {f"{name}-k2" for name in first - {"frontend"}}
        assert names() - {"frontend"} == first - {"frontend"} | second
        objects = render(VALUES, {"auth": {"rotation": 2, "keepFrom": 2}})
        assert make_users(api, objects, tmp_path).returncode == 0
        assert names() == second
        pod = select(objects, "StatefulSet", "rl-f-w")["spec"]["template"]["spec"]
        keys = next(volume for volume in pod["volumes"] if volume["name"] == "keys")["secret"]["secretName"]
        assert json.loads(secret(api, keys)["rl-f-w-0.creds"])["name"] == "rl-f-w-0-k2"


@dataclass
class Cluster:
    """The rendered objects, a nats-server with the rendered configuration, and the Secrets."""

    api: KubeApi
    objects: list[dict[str, Any]]
    folder: Path
    nats: str
    server: subprocess.Popen[bytes]

    def container(self, kind: str, name: str) -> dict[str, Any]:
        """Return the container of an object's pod, with its volumes."""
        pod = select(self.objects, kind, name)["spec"]["template"]["spec"]
        found: dict[str, Any] = pod["containers"][0] | {"volumes": pod["volumes"]}
        return found

    def mount(self, container: dict[str, Any], pod: str) -> dict[str, Path]:
        """Make the volumes of a container; return the directories and files by their paths in it."""
        found = {}
        volumes = {volume["name"]: volume for volume in container["volumes"]}
        for mount in container["volumeMounts"]:
            path = self.folder / pod / mount["name"]
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o777)
            if "secret" in volumes[mount["name"]]:
                for key, text in secret(self.api, volumes[mount["name"]]["secret"]["secretName"]).items():
                    (path / key).write_text(text)
                    (path / key).chmod(0o444)
                path /= mount.get("subPathExpr", "").replace("$(POD_NAME)", pod)
                assert path.exists()
            found[mount["mountPath"]] = path
        return found

    def environment(self, container: dict[str, Any], pod: str) -> dict[str, str]:
        """Return the variables of a container."""
        found = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
        for one in container["env"]:
            source = one.get("valueFrom") or {}
            if "fieldRef" in source:
                found[one["name"]] = pod
            elif source:
                found[one["name"]] = secret(self.api, source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]]
            else:
                found[one["name"]] = self.nats if one["name"] == "ROLLBUS_NATS" else one["value"]
        return found

    def command(self, container: dict[str, Any], env: dict[str, str], *, ports: dict[str, str]) -> list[str]:
        """Return command and arguments, with variables and free ports."""
        found = [*container["command"], *container.get("args", [])]
        for name, value in env.items():
            found = [part.replace(f"$({name})", value) for part in found]
        return [ports.get(part, part) for part in found]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Make the users, and run NATS with the rendered configuration and these users."""
    client, monitor = free_nodes(2)
    with serve_kube_api() as api:
        objects = render(VALUES)
        done = make_users(api, objects, folder / "job")
        assert done.returncode == 0, done.stderr
        for name in ("nats-config", "nats-users", "data"):
            (folder / name).mkdir()
        (folder / "nats-users/users.conf").write_text(secret(api, "rl-users")["users.conf"])
        config = select(objects, "ConfigMap", "rl-nats-config")["data"]["nats.conf"]
        for old, new in (("/var/run/nats", str(folder)), ('"/data"', json.dumps(str(folder / "data")))):
            assert old in config
            config = config.replace(old, new)
        config = config.replace("8222", monitor.rpartition(":")[2]).replace(": 4222", f": {client.rpartition(':')[2]}")
        (folder / "nats-config/nats.conf").write_text(config)
        server = subprocess.Popen(
            [require_binary(), "--config", folder / "nats-config/nats.conf"],
            env={"SERVER_NAME": "rl-nats-0"},
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Cluster(api, objects, folder, f"nats://{client}", server)
        finally:
            server.kill()
            server.wait()


def get(url: str, token: str = "") -> tuple[int, str]:
    """Return status and body; status 0 without an answer."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def isolate(mounts: dict[str, Path], command: list[str], scratch: Path) -> list[str]:
    """Return a command that runs `command` as user 10001 with a read-only root and these volumes.

    Paths that this machine lacks, such as /weights, cannot be made on its root, so an overlay in memory is the root.
    """
    base = Path(sys.base_prefix)
    lines = [
        "set -e",
        "mount --make-rprivate /",
        f"mount -t tmpfs tmpfs {scratch}",
        f"cd {scratch}; mkdir up work root python; chmod 755 up root",
        f"mount -t overlay overlay -o lowerdir=/,upperdir={scratch}/up,workdir={scratch}/work root",
    ]
    for path in ("/proc", "/dev", "/sys", str(ROOT), str(base)):
        if path == str(base) and str(base).startswith("/root/"):
            lines.append("mount -t tmpfs -o mode=755 tmpfs root/root")
        lines += [f"mkdir -p root{path}", f"mount --rbind {path} root{path}"]
    for path, source in mounts.items():
        make = f"mkdir -p root{path}" if source.is_dir() else f"mkdir -p root{Path(path).parent}; touch root{path}"
        lines += [make, f"mount --bind {source} root{path}"]
    lines += [
        "mount -o remount,ro,bind root 2>/dev/null || mount -o remount,ro root",
        f"mount -o remount,ro,bind root{ROOT}",
        'exec chroot --userspec=10001:10001 --groups=10001 root sh -c \'cd / && exec "$@"\' sh "$@"',
    ]
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines), "sh", *command]


def test_probes_drain_and_scaling_of_real_processes(tmp_path: Path) -> None:
    """A worker as the pod runs it (user 10001, read-only root) serves, is asked by its probes and drained by its hook.

    The queue's job and the HTTP service run as rendered too, and the scaler's query names what the service exposes.
    """
    probe, http = free_nodes(2)
    with cluster(tmp_path) as k, contextlib.ExitStack() as ended:
        job = k.container("Job", "rl-f-queues")
        env = k.environment(job, "q") | {"ROLLBUS_CREDS": str(k.mount(job, "q")["/keys"] / "admin.creds")}
        command = k.command(job, env, ports={})
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        deadline = time.monotonic() + 120
        while run.returncode and time.monotonic() < deadline:
            run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr

        worker = k.container("StatefulSet", "rl-f-w")
        pod = "rl-f-w-1"
        env, mounts = k.environment(worker, pod), k.mount(worker, pod)
        command = k.command(worker, env, ports={"0.0.0.0:8081": probe})
        scratch = tmp_path / "root"
        scratch.mkdir()
        for path in (tmp_path, *tmp_path.parents):
            if not path.stat().st_mode & 0o001:
                path.chmod(path.stat().st_mode | 0o011)
        probing = ["sh", "-c", "test $(id -u) = 10001 && touch /tmp/x /run/rollbus/x && ! touch /x && ! touch /venv/x"]
        tried = subprocess.run(isolate(mounts, probing, scratch), capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"no read-only root on this machine: {tried.stderr.strip()[-200:]}")
        log = (tmp_path / "worker.log").open("w")
        process = subprocess.Popen(isolate(mounts, command, scratch), env=env, stderr=log)
        ended.callback(log.close)
        ended.callback(process.wait)
        ended.callback(process.kill)
        paths = {name: worker[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
        assert becomes_true(lambda: get(f"http://{probe}{paths['startup']}")[0] == 200)
        assert becomes_true(lambda: get(f"http://{probe}{paths['readiness']}")[0] == 200), Path(log.name).read_text()
        check_scaling(k, http, ended)

        hook = [*worker["lifecycle"]["preStop"]["exec"]["command"]]
        # As an exec in the container: in the namespaces of its process.
        inside = ["nsenter", f"--target={process.pid}", "--mount", "--root", "--setuid=10001", "--setgid=10001", *hook]
        drained = subprocess.run(inside, env=env, capture_output=True, text=True, check=False)
        assert drained.returncode == 0, drained.stderr
        assert get(f"http://{probe}{paths['readiness']}")[0] == 503
        assert get(f"http://{probe}{paths['liveness']}")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, Path(log.name).read_text()


def check_scaling(k: Cluster, http: str, ended: contextlib.ExitStack) -> None:
    """Compare the scaler's query with the metrics of the HTTP service."""
    frontend = k.container("StatefulSet", "rl-f-http")
    env, pod = k.environment(frontend, "rl-f-http-0"), "rl-f-http-0"
    env["ROLLBUS_CREDS"] = str(k.mount(frontend, pod)["/keys/frontend.creds"])
    log = ended.enter_context((k.folder / "http.log").open("w"))
    command = k.command(frontend, env | {"HOME": str(k.folder)}, ports={"0.0.0.0:8080": http})
    service = subprocess.Popen(command, env=env | {"HOME": str(k.folder)}, stderr=log)
    ended.callback(service.wait)
    ended.callback(service.kill)
    token = env["ROLLBUS_HTTP_TOKEN"]
    assert becomes_true(lambda: "rollbus_worker_in_flight" in get(f"http://{http}/metrics", token)[1])
    assert get(f"http://{http}/metrics")[0] == 401
    metrics = get(f"http://{http}/metrics", token)[1]
    query = select(k.objects, "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    used = re.findall(r"by \((\w+)\) \((\w+)\{([^}]*)\}", query)
    assert [name for _, name, _ in used] == ["rollbus_queue_waiting", "rollbus_worker_in_flight"]
    for by, name, labels in used:
        series = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in re.findall(rf"^{name}{{.*", metrics, re.M)]
        assert series
        # Prometheus adds the label fleet.
        matchers = [one for one in re.findall(r'(\w+)(=~?)"([^"]*)"', labels) if one[0] != "fleet"]
        for one in series:
            assert by in one
            for label, operator, value in matchers:
                assert re.fullmatch(value if operator == "=~" else re.escape(value), one[label])
    if shutil.which("promtool"):
        rules = k.folder / "rules.yml"
        rules.write_text(json.dumps({"groups": [{"name": "g", "rules": [{"record": "load", "expr": query}]}]}))
        checked = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
