"""Make the missing users of NATS and their Secrets. The Job of the chart runs this; to run it again changes nothing.

It reads its named Secrets into a directory, runs `rollbus auth`, and adds the missing keys. It never replaces a user's
key. The Secret of the servers (users.conf, public keys only) is written last and follows the list of users.
"""

import argparse
import base64
import json
import os
import re
import secrets
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 30


class Api:
    """The Secrets of one namespace."""

    def __init__(self, url: str, account: Path, namespace: str) -> None:
        self._url = f"{url}/api/v1/namespaces/{namespace}/secrets"
        self._token = (account / "token").read_text().strip()
        ca = account / "ca.crt"
        self._tls = ssl.create_default_context(cafile=str(ca)) if ca.exists() else None

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a Secret, or None if it is missing."""
        try:
            return self._send("GET", f"/{name}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def add(self, name: str, before: dict[str, Any] | None, data: dict[str, str]) -> None:
        """Create a Secret, or set these keys of the Secret that was read; fail if it changed meanwhile."""
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
        if before is None:
            meta = {"name": name, "labels": {"app.kubernetes.io/name": "rollbus"}}
            body = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": meta, "data": encoded}
            self._send("POST", "", body)
        else:
            version = before["metadata"]["resourceVersion"]
            self._send("PATCH", f"/{name}", {"metadata": {"resourceVersion": version}, "data": encoded})

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
        )
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls)
        )
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def decode(secret: dict[str, Any] | None) -> dict[str, str]:
    """Return the data of a Secret as text; nothing if it is missing."""
    data = (secret or {}).get("data") or {}
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def auth(action: str, folder: Path, fleet: str, users: list[dict[str, Any]]) -> None:
    """Run `rollbus auth` for these users."""
    command = ["rollbus", "auth", action, "--dir", str(folder), "--fleet", fleet]
    for user in users:
        models = user.get("models") if action == "init" else None
        names = [f"{user['name']}:{model}" for model in models] if models else [user["name"]]
        for name in names:
            command += [f"--{user['role']}", name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def rotation(name: str) -> int:
    """Return the rotation in a user's name: NAME or NAME-kN."""
    found = re.search(r"-k([1-9][0-9]*)$", name)
    return int(found[1]) if found else 1


def update_fleet(folder: Path, plan: dict[str, Any], fleet: dict[str, Any]) -> None:
    """Make the missing users of a fleet, and remove those of earlier rotations."""
    path = folder / "users.json"
    known = json.loads(path.read_text())["users"] if path.exists() else []
    known = [user for user in known if user["fleet"] == fleet["name"]]
    users = fleet["users"]
    # A user whose Secret was deleted gets another key.
    have = {(user["role"], user["name"]) for user in known}
    lost = [
        user
        for user in users
        if (user["role"], user["name"]) in have and not credentials(folder, fleet["name"], user).exists()
    ]
    if lost:
        auth("remove", folder, fleet["name"], lost)
    auth("init", folder, fleet["name"], users)
    # `init` always makes an admin, a frontend and a viewer by these names.
    wanted = {(user["role"], user["name"]) for user in users}
    made = {(role, role) for role in ("admin", "frontend", "viewer")} - wanted
    old = {one for one in have if rotation(one[1]) < plan["keepFrom"]} - wanted
    if made | old:
        auth("remove", folder, fleet["name"], [{"role": role, "name": name} for role, name in sorted(made | old)])


def credentials(folder: Path, fleet: str, user: dict[str, Any]) -> Path:
    """Return the file of a user's credentials."""
    return folder / fleet / f"{user['role']}-{user['name']}.creds"


def write(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)


def main() -> int:
    """Run once; the exit code is 1 if a Secret cannot be read or written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--account", type=Path, default=ACCOUNT)
    parser.add_argument("--api", default="https://kubernetes.default.svc")
    args = parser.parse_args()
    plan = json.loads(args.plan.read_text())
    api = Api(args.api, args.account, os.environ["POD_NAMESPACE"])
    names = [plan["root"], plan["server"]]
    for fleet in plan["fleets"]:
        names += [fleet["tokens"], *(user["secret"] for user in fleet["users"])]
    before = {name: api.read(name) for name in dict.fromkeys(names)}
    data = {name: decode(secret) for name, secret in before.items()}
    wanted: dict[str, dict[str, str]] = {name: {} for name in before}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if "users.json" in data[plan["server"]]:
            write(folder / "users.json", data[plan["server"]]["users.json"])
        for fleet in plan["fleets"]:
            name = fleet["name"]
            root = folder / name / "root.seed"
            kept = [user for user in fleet["users"] if user["key"] in data[user["secret"]]]
            if name in data[plan["root"]]:
                write(root, data[plan["root"]][name])
            elif kept:
                sys.stderr.write(
                    f"make-users: the Secret {plan['root']} has no key {name!r}, but {kept[0]['secret']} has users of "
                    "this fleet. Restore it, or delete all Secrets of the fleet.\n"
                )
                return 1
            for user in kept:
                write(credentials(folder, name, user), data[user["secret"]][user["key"]])
            update_fleet(folder, plan, fleet)
            wanted[plan["root"]][name] = root.read_text()
            wanted[fleet["tokens"]] = {key: secrets.token_urlsafe(32) for key in ("http", "admin")}
            for user in fleet["users"]:
                wanted[user["secret"]][user["key"]] = credentials(folder, name, user).read_text()
        for name, found in wanted.items():
            missing = {key: value for key, value in found.items() if key not in data[name]}
            if missing and name != plan["server"]:
                api.add(name, before[name], missing)
                sys.stdout.write(f"made {', '.join(missing)} in {name}\n")
        public = {file: (folder / file).read_text() for file in ("users.conf", "users.json")}
        if public != data[plan["server"]]:
            api.add(plan["server"], before[plan["server"]], public)
            sys.stdout.write(f"wrote the list of users in {plan['server']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
