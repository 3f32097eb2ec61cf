"""A Slurm cluster of one node on this machine: munged, slurmctld and slurmd without cgroups and accounting."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.waits import SOON_S

CONFIG = """\
ClusterName=rollbus
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=8000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""More cores than the machine has, so that all workers of a test run."""


def last_line(text: str) -> str:
    """Return the last line of a program's output, which gives the reason of a failure."""
    return (text.strip().splitlines() or ["no output"])[-1]


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Slurm:
    """Commands to the cluster.

    Args:
        folder: directory of the cluster's files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run a command of Slurm, or a program that calls one; return its stdout, or fail with its last line."""
        env = self._env if env is None else {**self._env, **env}
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, check=False, timeout=SOON_S
        )
        assert done.returncode == 0, f"{command[0]}: {last_line(done.stderr)}"
        return done.stdout.strip()

    def log(self, job: str) -> str:
        """Return what a job and its workers have written."""
        path = self.folder / f"rollbus-{job}.log"
        return path.read_text() if path.exists() else ""

    def step_of(self, job: str, name: str) -> str:
        """Return the id of a running step by its name."""
        lines = self.call("squeue", "--noheader", "--steps", "--jobs", job, "--format=%i %j").splitlines()
        [step] = [line.split()[0] for line in lines if line.split()[1] == name]
        return step

    def state_of(self, job: str) -> list[str]:
        """Return a job's state and how often it was requeued; nothing once Slurm has forgotten it."""
        shown = self.call("squeue", "--noheader", "--states=all", "--jobs", job, "--Format=State:20,RestartCnt:20")
        return shown.split()

    def start_now(self, job: str) -> None:
        """Start a requeued job without the two minutes that Slurm waits otherwise."""
        self.call("scontrol", "update", f"job={job}", "StartTime=now")


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Run a cluster; skip the test with the last line of the first program that does not run here."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(program, path=path) is None:
            pytest.skip(f"{program} is not installed; .ci/system-packages installs it as root on Debian")
    (folder / "munge").mkdir(mode=0o700)
    (folder / "munge/key").touch(0o400)
    (folder / "munge/key").write_bytes(os.urandom(1024))
    config = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    ports = {"controller": free_port(), "daemon": free_port()}
    config.write_text(CONFIG.format(host=host, user=getpass.getuser(), folder=folder, **ports))
    slurm = Slurm(folder)
    munge = [f"--{name}={folder}/munge/{name}" for name in ("pid-file", "log-file", "seed-file")]
    munge += [f"--key-file={folder}/munge/key", f"--socket={folder}/munge.socket"]
    daemons = (["munged", "--foreground", "--force", *munge], ["slurmctld", "-D", "-c"], ["slurmd", "-D"])
    with contextlib.ExitStack() as until_ended:
        env = {**os.environ, "SLURM_CONF": str(config), "PATH": path}
        logs = [folder / f"{command[0]}.log" for command in daemons]
        processes = []
        for command, log in zip(daemons, logs, strict=True):
            file = until_ended.enter_context(log.open("w"))
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=file)
            processes.append(process)
            until_ended.callback(end, process)
        deadline_s = time.monotonic() + SOON_S
        while not is_up(slurm):
            for process, log in zip(processes, logs, strict=True):
                if process.poll() is not None:
                    pytest.skip(f"{log.stem} does not run here: {last_line(log.read_text())}")
            if time.monotonic() > deadline_s:
                pytest.skip(f"slurmd did not register: {last_line(logs[-1].read_text())}")
            time.sleep(0.1)
        yield slurm
        slurm.call("scancel", "--user", getpass.getuser())
        while slurm.call("squeue", "--noheader") and time.monotonic() < deadline_s + 10 * SOON_S:
            time.sleep(0.1)


def is_up(slurm: Slurm) -> bool:
    """Return True if the node may run jobs."""
    with contextlib.suppress(AssertionError):
        return slurm.call("sinfo", "--noheader", "--format=%T") == "idle"
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a daemon."""
    process.terminate()
    try:
        process.wait(SOON_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
