"""Which worker a session goes to."""

from rollbus.bus.client.sessions import MAX_SESSIONS, Sessions
from rollbus.bus.protocol.queue.rendezvous import rendezvous
from rollbus.schemas.presence import WorkerPresence
from tests.support.presences import presence


def serving(*workers: str) -> list[WorkerPresence]:
    """Announcements of these."""
    return [presence(worker=worker, lease_s=5.0) for worker in workers]


def choice(sessions: Sessions, session: str, *workers: str) -> str | None:
    """The id of the worker that is chosen."""
    chosen = sessions.choose("m", session, serving(*workers))
    return None if chosen is None else chosen.worker


def test_clients_that_never_spoke_agree() -> None:
    """Two clients choose the same worker for a session, whatever order they know the workers in."""
    names = [f"w{i}" for i in range(10)]
    for i in range(100):
        assert choice(Sessions(), f"s{i}", *names) == choice(Sessions(), f"s{i}", *reversed(names))


def test_sessions_are_spread_and_few_move() -> None:
    """Every worker gets its share, and a worker that leaves moves its own sessions only."""
    names = [f"w{i}" for i in range(10)]
    before = {f"s{i}": rendezvous(f"s{i}", names) for i in range(2000)}
    after = {session: rendezvous(session, names[1:]) for session in before}

    assert all(100 < list(before.values()).count(name) < 300 for name in names)
    assert all(after[session] == worker for session, worker in before.items() if worker != "w0")


def test_who_served_last_comes_first() -> None:
    """A session goes back to the worker that served it, as long as that serves."""
    sessions = Sessions()
    usual = choice(sessions, "s", "a", "b")
    other = "b" if usual == "a" else "a"
    sessions.remember("m", "s", other)

    assert choice(sessions, "s", "a", "b") == other
    assert choice(sessions, "s", str(usual)) == usual
    assert choice(sessions, "s") is None


def test_models_do_not_share_sessions() -> None:
    """The same session id for another model is another session."""
    sessions = Sessions()
    usual = choice(sessions, "s", "a", "b")
    sessions.remember("other", "s", "b" if usual == "a" else "a")
    assert choice(sessions, "s", "a", "b") == usual


def test_only_so_many_are_remembered() -> None:
    """Beyond the bound, the sessions that were not used for longest are forgotten."""
    sessions = Sessions()
    usual = rendezvous("s0", ["a", "b"])
    other = "b" if usual == "a" else "a"
    for i in range(MAX_SESSIONS + 1):
        sessions.remember("m", f"s{i}", other)
        if i == 0:
            sessions.remember("m", "kept", other)
        if i == MAX_SESSIONS // 2:
            sessions.remember("m", "kept", other)

    assert len(sessions) == MAX_SESSIONS
    assert choice(sessions, "s0", "a", "b") == usual
    assert choice(sessions, "kept", "a", "b") == other
