"""The parent process of an embedded nats-server. It outlives the program just long enough to clean up.

`EmbeddedServer` runs this file as a script in its own session, so that Ctrl-C on the terminal reaches neither the guard
nor the server. The guard starts the server and reads orders from its standard input, one byte each: `t` terminates the
server, `k` kills it. When the program has exited for any reason, the guard kills the server and removes the temporary
folder. The guard exits with the server's exit code, or with 128 + the signal that ended the server.

It imports only a few modules of the standard library, because its start-up time delays the server.
"""

import os
import select
import signal
import sys
import time

TERMINATE = b"t"
KILL = b"k"
GRACE_S = 5.0
"""Seconds from SIGTERM to SIGKILL. nats-server takes milliseconds to close its streams; a frozen server never exits."""
PID_LINE = "rollbus.guard server_pid="
"""Prefix of the first line of the log. The server's process id follows."""
_POLL_S = 0.5
"""Seconds between checks of the parent process. A forked child of the parent may keep the standard input open."""
_PR_SET_PDEATHSIG = 1


def main(parent: int, folder: str, command: list[str]) -> int:
    """Run `command` until the command or the parent exits.

    Args:
        parent: process id of the program that started the guard.
        folder: folder that is removed if the parent exits first.
        command: program and arguments of the server.

    Returns:
        The exit code of the guard.
    """
    alive_read, alive_write = os.pipe()
    os.set_inheritable(alive_write, True)
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        _become_server(guard, command)
    os.close(alive_write)
    is_abandoned = _watch(parent, server, alive_read)
    _, status = os.waitpid(server, 0)
    if is_abandoned:
        import shutil  # takes longer to import than all other modules here, and is rarely needed

        shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _become_server(guard: int, command: list[str]) -> None:
    """Replace this forked child by the server. Never returns."""
    try:
        _die_with(guard)
        os.write(2, f"{PID_LINE}{os.getpid()}\n".encode())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _die_with(guard: int) -> None:
    """On Linux, have the kernel kill this process when the guard dies, because the guard may be killed too."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guard:  # the guard died before the call
        os._exit(127)


def _watch(parent: int, server: int, alive: int) -> bool:
    """Execute orders until the server has exited. Return True if the parent has exited.

    `alive` is the read end of a pipe. It is closed when the server, which holds the other end, exits.
    """
    inputs = [alive, 0]
    is_abandoned = False
    kill_at_s = float("inf")
    while True:
        ready, _, _ = select.select(inputs, [], [], _POLL_S)
        order = os.read(0, 1) if 0 in ready else None
        if order == b"" or os.getppid() != parent:
            is_abandoned = True
            inputs = [alive]
        if alive in ready:
            return is_abandoned
        if order == TERMINATE:
            os.kill(server, signal.SIGTERM)
            kill_at_s = time.monotonic() + GRACE_S
        if order == KILL or is_abandoned or time.monotonic() >= kill_at_s:
            os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    # Exit immediately, without finalizing the interpreter: other programs may use the folder only after this exit.
    os._exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
