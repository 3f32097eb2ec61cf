"""A leaf node that `rollbus nats leaf` configures: its users have the same permissions as at the hub, and no more."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

import rollbus
from rollbus.bus.auth.credentials import Credentials, Role, Tls, load_credentials
from rollbus.bus.auth.users import credentials_path, ensure_users, remove_user, write_server_config
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import Connection, open_connection
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.nats.server import Server
from rollbus.frontend.cli.app import main
from rollbus.schemas.errors import BusBroken
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.worker import Worker
from tests.support.certificates import certificate
from tests.support.configured_servers import check_config, configured_servers, free_nodes
from tests.support.fleet import synthetic_worker
from tests.support.patience import SOON_S
from tests.support.requests import greedy
from tests.support.tcp_proxy import TcpProxy, tcp_proxy
from tests.support.waits import until, until_true

USERS = [
    ("F", Role.ADMIN, "boss"),
    ("F", Role.TRAINER, "alice"),
    ("F", Role.TRAINER, "bob"),
    *(("F", Role.WORKER, name) for name in ("w0", "w1", "w2")),
]
AT_LEAF = ["--user=trainer-alice", "--user=worker-w1", "--user=worker-w2"]
TOKENS = 400
"""Length of a request that runs while the link is cut: it takes 4 seconds."""
CUT_S = 1.0
REPLIES = (
    "$KV.rollbus.F.synthetic",
    "rb.v1.F.req.bob.synthetic.normal",
    "$JS.API.STREAM.PURGE.KV_rollbus",
    "$JS.API.STREAM.DELETE.rb~F~synthetic",
    "rb.v1.F.presence.w1",
    "_INBOX_trainer.bob.x",
)
"""Subjects of other users, where an answer of JetStream would do damage."""


def written(folder: Path, *options: str, port: int = 7422) -> tuple[Path, Path]:
    """Run `rollbus nats leaf` and return the paths of the leaf's and of the hub's file."""
    shared = ["--dir", str(folder), "--fleet", "F", "--hub", "127.0.0.1", "--leaf-port", str(port)]
    assert main(["nats", "leaf", *shared, *AT_LEAF, *options]) == 0
    return folder / "leaf-leaf.conf", folder / "leafs.conf"


def test_nats_server_accepts_the_written_files(tmp_path: Path) -> None:
    """nats-server accepts the files with and without TLS on the link.

    Only the owner can read the seeds, and a second run replaces the users.
    """
    ensure_users(tmp_path, USERS)
    write_server_config(tmp_path, "127.0.0.1:4222", Tls())
    cert, key = map(str, certificate(tmp_path))
    hub = tmp_path / "nats-server.conf"
    hub.write_text(f"{hub.read_text()}include leafs.conf\n")
    bob = load_credentials(credentials_path(tmp_path, "F", Role.TRAINER, "bob")).seed
    with_tls = [f"--cluster-cert={cert}", f"--cluster-key={key}", f"--cluster-ca={cert}"]
    for options in ([], with_tls, ["--user=worker-w0"]):
        leaf, part = written(tmp_path, *options)
        check_config(leaf)
        check_config(hub)
        assert (leaf.stat().st_mode | part.stat().st_mode) & 0o077 == 0
        assert ("tls://127.0.0.1:7422" in leaf.read_text()) is (options is with_tls)
    assert remove_user(tmp_path, ("F", Role.TRAINER, "bob"))
    # nats-server rejects a file with an unknown account, so the file still contains the account of the removed user.
    assert "F~trainer~bob" in part.read_text()
    check_config(hub)
    assert load_credentials(credentials_path(tmp_path, "F", Role.WORKER, "w0")).seed in leaf.read_text()
    assert bob not in leaf.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hub", "a"], "leaf requires hub and users"),
        (["--hub", "a", "--user", "trainer-eve"], "names the trainer eve of fleet F; allowed: users of this folder"),
        (["--hub", "a", "--user", "admin-boss"], "admins connect to the hub"),
        (["--hub", "a", "--user", "alice"], "'alice' is not a ROLE-NAME"),
        (["--hub", "nats://a", "--user", "trainer-alice"], "is not a list of hosts"),
    ],
)
def test_invalid_options_of_nats_leaf_are_a_usage_error(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invalid options of `rollbus nats leaf` are a usage error, and no file is written."""
    ensure_users(tmp_path, USERS)
    try:
        code = main(["nats", "leaf", "--dir", str(tmp_path), "--fleet", "F", *options])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "leafs.conf").exists()


async def sizes(rb: rollbus.Client, *, count: int, max_tokens: int) -> list[int]:
    """Send `count` requests at once and return the number of tokens of each result."""
    async with asyncio.TaskGroup() as tasks:
        results = [tasks.create_task(rb.complete(greedy(prompt, max_tokens))) for prompt in range(count)]
    return [one.result().token_ids.size for one in results]


class Site:
    """A hub, a leaf whose link passes through a proxy, and their users."""

    def __init__(self, folder: Path, hub: str, leaf: str, link: TcpProxy) -> None:
        self._folder = folder
        self.hub = f"nats://{hub}"
        self.leaf = f"nats://{leaf}"
        self.link = link

    def credentials(self, role: Role, name: str) -> Credentials:
        """Return the credentials of one user, which are valid at the hub and at the leaf."""
        return load_credentials(credentials_path(self._folder, "F", role, name))

    @contextlib.asynccontextmanager
    async def worker(self, url: str, name: str, **fields: float) -> AsyncIterator[Worker]:
        """Run a worker at the hub or at the leaf."""
        credentials = self.credentials(Role.WORKER, name)
        config = SyntheticConfig(**fields)  # type: ignore[arg-type]
        async with synthetic_worker(url, "F", config=config, credentials=credentials, worker_id=name) as (worker, _):
            yield worker

    @contextlib.asynccontextmanager
    async def connected(self, url: str, role: Role, name: str) -> AsyncIterator[Connection]:
        """Open a bare NATS connection of a user."""
        nats = await open_connection(Server(url, self.credentials(role, name)), name=name)
        try:
            yield nats
        finally:
            await nats.shut()


@contextlib.asynccontextmanager
async def site(folder: Path, *, is_honest: bool = True) -> AsyncIterator[Site]:
    """Run a hub and a leaf with the queue of the model `synthetic`.

    Args:
        is_honest: True if the leaf enforces the permissions of its users.
    """
    hub, leaf, link = free_nodes(3)
    ensure_users(folder, USERS)
    write_server_config(folder, hub, Tls())
    config = folder / "nats-server.conf"
    config.write_text(f"{config.read_text()}include leafs.conf\n")
    port = int(link.rpartition(":")[2])
    async with tcp_proxy(f"nats://{link}") as proxy:
        path, _ = await asyncio.to_thread(written, folder, f"--listen={leaf}", port=port)
        text = path.read_text().replace(f"nats-leaf://{link}", proxy.url.replace("nats:", "nats-leaf:"))
        path.write_text(text if is_honest else re.sub(r'"allow": \[[^]]*\]', '"allow": [">"]', text))
        async with configured_servers([config, path]):
            here = Site(folder, hub, leaf, proxy)

            async def is_provisioned() -> bool:
                try:
                    await provision(Server(here.hub, here.credentials(Role.ADMIN, "boss")), "F", ["synthetic"])
                except BusBroken:
                    return False  # the server has not started yet
                return True

            await until(is_provisioned, expected=True)
            await until_true(lambda: proxy.num_connections == len(AT_LEAF))
            yield here


@pytest.mark.slow
async def test_workers_of_leaf_and_hub_serve_trainers_on_both_sides(tmp_path: Path) -> None:
    """Workers on both sides serve trainers on both sides.

    An admin's commands reach all workers, and a trainer's commands are denied.
    """
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(site(tmp_path))
        for url, name in ((here.hub, "w0"), (here.leaf, "w1"), (here.leaf, "w2")):
            await stack.enter_async_context(here.worker(url, name))
        alice, bob, boss = [
            await stack.enter_async_context(rollbus.connect(Server(url, here.credentials(role, name))))
            for url, role, name in (
                (here.leaf, Role.TRAINER, "alice"),
                (here.hub, Role.TRAINER, "bob"),
                (here.hub, Role.ADMIN, "boss"),
            )
        ]
        for rb in (alice, bob):
            await rb.fleet.wait_for_workers(3, timeout_s=SOON_S)
            assert await sizes(rb, count=12, max_tokens=5) == [5] * 12
        with pytest.raises(rollbus.PermissionDenied, match=r"user alice \(role trainer\) may not record commands"):
            await alice.fleet.pause()
        assert (await alice.fleet.state()).desired == {}
        assert set((await boss.fleet.pause()).applied) == {"w0", "w1", "w2"}
        await boss.fleet.resume()


@pytest.mark.slow
@pytest.mark.parametrize("is_honest", [True, False])
async def test_the_hub_denies_a_leaf_the_subjects_of_other_users(tmp_path: Path, is_honest: bool) -> None:
    """The hub denies a leaf the subjects of other users, also as reply subjects.

    It does so even if the leaf permits everything.
    """
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(site(tmp_path, is_honest=is_honest))
        boss = await stack.enter_async_context(here.connected(here.hub, Role.ADMIN, "boss"))
        bob = await stack.enter_async_context(here.connected(here.hub, Role.TRAINER, "bob"))
        alice = await stack.enter_async_context(here.connected(here.leaf, Role.TRAINER, "alice"))
        received: list[str] = []

        async def record_message(message: Msg) -> None:
            received.append(message.subject)

        for subject in ("rb.v1.F.presence.*", "_INBOX_trainer.bob.x"):
            await bob.subscribe(subject, cb=record_message)

        async def stored() -> list[object]:
            return [(await ask(boss, f"STREAM.INFO.{name}"))["state"] for name in ("KV_rollbus", "rb~F~synthetic")]

        async def is_linked() -> bool:
            with contextlib.suppress(BusBroken):
                return bool((await ask(alice, "INFO"))["type"].endswith("account_info_response"))
            return False

        before = await stored()
        for forbidden in REPLIES:
            for allowed in ("$JS.API.INFO", "$JS.API.STREAM.INFO.KV_rollbus", "rb.v1.F.ping"):
                await alice.publish(allowed, b"", reply=forbidden)
            # The hub answers this request over the same link after it has processed the earlier messages.
            await until(is_linked, expected=True)
            await alice.publish(forbidden, b"junk")
            await until(is_linked, expected=True)
        await alice.publish("rb.v1.F.req.alice.synthetic.normal", b"her own")
        await until(is_linked, expected=True)
        await ask(bob, "INFO")
        after = await stored()
    assert received == []
    assert (after[0], after[1]["messages"]) == (before[0], 1)  # type: ignore[index]


@pytest.mark.slow
async def test_a_trainer_loses_no_request_while_the_link_of_its_leaf_is_cut(tmp_path: Path) -> None:
    """While a leaf's link is cut, its trainer loses no request.

    This holds for requests that run at the hub and for new requests.
    """
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(site(tmp_path))
        worker = await stack.enter_async_context(here.worker(here.hub, "w0", step_s=0.01))
        server = Server(here.leaf, here.credentials(Role.TRAINER, "alice"))
        rb = await stack.enter_async_context(rollbus.connect(server))
        await rb.fleet.wait_for_workers(1, timeout_s=SOON_S)
        async with asyncio.TaskGroup() as tasks:
            started = tasks.create_task(sizes(rb, count=4, max_tokens=TOKENS))
            await until_true(lambda: worker.presence().in_flight)
            here.link.cut()
            late = tasks.create_task(sizes(rb, count=4, max_tokens=5))
            await asyncio.sleep(CUT_S)
            assert not started.done()
            await here.link.restore()
        assert started.result() == [TOKENS] * 4
        assert late.result() == [5] * 4
