"""Divides the GPUs of this machine among the workers.

CUDA shows a process the GPUs that `CUDA_VISIBLE_DEVICES` lists, in that order. vLLM computes on the first of them.
So each worker gets a different list.
"""

import argparse
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from ...schemas.worker_options import ON_CPU, computes_on_cpu
from .console import note
from .exits import CommandFailed, ExitCode

__all__ = [
    "VISIBLE_DEVICES",
    "Gpus",
    "divide_gpus",
    "find_gpus",
    "gpu_shares",
    "gpus_per_engine",
]

VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"
DRIVER_ORDER: Final = "PCI_BUS_ID"
"""Order of the driver's list. On a machine with GPUs of several kinds, the default order of CUDA is different."""
NO_DEVICES: Final = frozenset({"", "-1", "none", "void", "nodevfiles"})
"""Values that mean no GPU. The names come from NVIDIA's container runtime and from Slurm."""
DEVICE: Final = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")
DRIVER_TIMEOUT_S: Final = 30.0
"""Seconds to wait for the driver. It first initializes GPUs that no process uses: some seconds for eight GPUs."""
SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size")
"""Engine arguments of vLLM. The product of their values is the number of GPUs of an engine."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs for workers, as entries of `CUDA_VISIBLE_DEVICES`, and the name of the source that lists them."""

    devices: tuple[str, ...]
    source: str

    @classmethod
    def from_variable(cls, value: str) -> "Gpus":
        """Parse a value of `CUDA_VISIBLE_DEVICES`: indices, or UUIDs of GPUs or of MIG devices.

        Raises:
            CommandFailed: an entry has another form, or occurs twice.
        """
        devices: tuple[str, ...] = ()
        if value.strip().lower() not in NO_DEVICES:
            devices = tuple(entry.strip() for entry in value.split(","))
        for i, device in enumerate(devices):
            if not DEVICE.fullmatch(device):
                allowed = "indices, GPU-... and MIG-... with commas between them, or nothing for no GPU"
                raise CommandFailed(f"${VISIBLE_DEVICES} has {device!r}; allowed: {allowed}", ExitCode.USAGE)
            if device in devices[:i]:
                raise CommandFailed(f"${VISIBLE_DEVICES} has {device!r} twice", ExitCode.USAGE)
        return cls(devices, f"${VISIBLE_DEVICES}")

    @classmethod
    def from_driver(cls, listing: str) -> "Gpus":
        """Parse the output of `nvidia-smi -L`. MIG devices replace the GPU that is divided into them."""
        found: dict[str, list[str]] = {}
        for line in listing.splitlines():
            if gpu := re.match(r"GPU (\d+):", line):
                found[gpu[1]] = []
            elif (mig := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line)) and found:
                found[[*found][-1]].append(mig[1])
        return cls(tuple(device for index, parts in found.items() for device in parts or [index]), "nvidia-smi")

    def environment(self, share: Sequence[str]) -> dict[str, str]:
        """Return the environment variables of a process that may see only the GPUs in `share`."""
        # If the user set the list, its indices count in the order of devices that the user chose.
        order = {} if self.source != "nvidia-smi" else {DEVICE_ORDER: DRIVER_ORDER}
        return {VISIBLE_DEVICES: ",".join(share), **order}


def find_gpus(environment: Mapping[str, str]) -> Gpus:
    """Return the GPUs of `CUDA_VISIBLE_DEVICES`. If it is not set, return the GPUs that the driver lists.

    Without `nvidia-smi` there are no GPUs.

    Raises:
        CommandFailed: the variable has a wrong entry, or the driver does not answer.
    """
    value = environment.get(VISIBLE_DEVICES)
    if value is not None:
        return Gpus.from_variable(value)
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=DRIVER_TIMEOUT_S
        )
    except FileNotFoundError:
        return Gpus((), "nvidia-smi, which is not installed")
    except (OSError, subprocess.SubprocessError) as exc:
        said = getattr(exc, "stdout", None) or getattr(exc, "stderr", None) or exc
        raise CommandFailed(
            f"`nvidia-smi -L` failed: {str(said).strip()}; set ${VISIBLE_DEVICES}, empty for no GPU"
        ) from exc
    return Gpus.from_driver(done.stdout)


def gpus_per_engine(engine_args: str | None) -> int:
    """Return the number of GPUs that an engine with these arguments uses.

    Args:
        engine_args: fields of vLLM's `AsyncEngineArgs` as a JSON object. None: no fields.

    Raises:
        CommandFailed: one of `SIZES` is not a positive integer.
    """
    given = json.loads(engine_args or "{}")
    sizes = {name: given.get(name, 1) for name in SIZES}
    # Count only the part of the engine on this machine, if the engine uses several machines.
    sizes["data_parallel_size"] = given.get("data_parallel_size_local") or sizes["data_parallel_size"]
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise CommandFailed(f"--engine-args: {name} is {size!r}; allowed: integers from 1", ExitCode.USAGE)
    return prod(sizes.values())


def gpu_shares(gpus: Gpus, workers: Sequence[str], each: int) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of each worker. Each worker gets `each` GPUs, and no GPU belongs to two workers.

    Raises:
        CommandFailed: there are too few GPUs.
    """
    devices = gpus.devices
    if not devices:
        raise CommandFailed(f"--gpus-per-worker {each}: no GPU listed by {gpus.source}", ExitCode.USAGE)
    needed = len(workers) * each
    if needed > len(devices):
        plural = "s" * (len(workers) > 1), "s" * (each > 1)
        raise CommandFailed(
            f"{len(workers)} worker{plural[0]} with {each} GPU{plural[1]} each need {needed} GPUs, but "
            f"{gpus.source} lists {len(devices)} ({', '.join(devices)}); allowed: at most {len(devices) // each} "
            "workers, including prefill workers, or --gpus-per-worker 0, with which all workers see all GPUs",
            ExitCode.USAGE,
        )
    return {name: devices[i * each : (i + 1) * each] for i, name in enumerate(workers)}


def divide_gpus(args: argparse.Namespace, workers: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the variables that give each worker its own GPUs, and print the GPUs of each worker on stderr.

    The result is empty if the GPUs are not divided.

    Args:
        args: the options `gpus_per_worker`, `engine` and `engine_args`.

    Raises:
        CommandFailed: there are too few GPUs, or an engine needs a different number of GPUs than the option states.
    """
    each: int | None = args.gpus_per_worker
    needs_gpus = args.engine == "vllm" and not computes_on_cpu()
    if each == 0 or (each is None and not needs_gpus):
        return {}
    if args.engine == "vllm" and not needs_gpus:
        raise CommandFailed(f"--gpus-per-worker {each}: {ON_CPU}", ExitCode.USAGE)
    gpus = find_gpus(os.environ)
    if each is None and not gpus.devices:
        return {}
    needed = gpus_per_engine(args.engine_args) if needs_gpus or each is None else each
    if each not in (None, needed):
        raise CommandFailed(
            f"--gpus-per-worker {each}: an engine with these --engine-args uses {needed} GPUs, the product of "
            f"{', '.join(SIZES)}; allowed: the same number, or no --gpus-per-worker",
            ExitCode.USAGE,
        )
    shares = gpu_shares(gpus, workers, needed)
    shown = [f"{name} has {', '.join(share)}" for name, share in shares.items()]
    if unused := gpus.devices[len(workers) * needed :]:
        shown.append(f"unused: {', '.join(unused)}")
    note(f"GPUs of {gpus.source}: {'; '.join(shown)}")
    return {name: gpus.environment(share) for name, share in shares.items()}
