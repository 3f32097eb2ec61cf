"""A process that has imported the command line, and forks for each command: it starts in milliseconds, not in a second.

`tests/cli/support.py` starts this file. It receives the arguments, the environment and the directory of each command as
JSON, with the files for stdin, stdout, stderr and the report: the id of the process, and at its end the exit code.
"""

import fcntl
import importlib
import json
import os
import signal
import socket
import sys
import termios

MODULES = (
    *("admin", "auth", "bench", "control", "options", "records", "weights", "generate.command", "local.http"),
    *("watch.status", "watch.terminal", "watch.traces", "watch.why", "watch.experts", "doctor.server"),
)
MAX_BYTES = 100_000


def run(arguments: list[str]) -> int:
    """Run the command line as `python -m rollbus.frontend.cli` does."""
    from rollbus.frontend.cli import main

    sys.argv = [importlib.import_module("rollbus.frontend.cli").__path__[0] + "/__main__.py", *arguments]
    try:
        return main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # noqa: BLE001 - the end of the process
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()


def serve(order: bytes, streams: list[int], report: int) -> None:
    """Run one command in a process of its own, and report its end. A terminal is its controlling terminal."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    arguments, env, directory = json.loads(order)
    pid = os.fork()
    if pid == 0:
        os.close(report)
        for target, source in enumerate(streams):
            os.dup2(source, target)
            os.close(source)
        if os.isatty(0):
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(env)
        os._exit(run(arguments))
    os.write(report, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def main(channel: socket.socket) -> None:
    """Serve commands until the other end of the channel is closed."""
    for name in MODULES:
        importlib.import_module(f"rollbus.frontend.cli.{name}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, files, _, _ = socket.recv_fds(channel, MAX_BYTES, 4)
        if not order:
            return
        if os.fork() == 0:
            channel.close()
            serve(order, files[:3], files[3])
            os._exit(0)
        for file in files:
            os.close(file)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
