"""Pins a version to its content: the digest that all workers found at its source when they staged it."""

from collections.abc import Collection, Mapping
from typing import Final, TypeVar

from msgspec.structs import replace

from ....schemas.acks import Ack
from ....schemas.control import LoadLora, UpdateWeights
from ....schemas.desired import DesiredState
from ....schemas.errors import ControlCode, ControlError
from ....schemas.presence import WorkerPresence
from ....schemas.weights import WeightSource

__all__ = ["pin", "unpinned", "without"]

MAX_NAMED: Final = 8
"""Workers that a message names for each digest."""

Load = TypeVar("Load", UpdateWeights, LoadLora)


def without(capability: str, workers: Collection[WorkerPresence], model: str) -> tuple[str, ...]:
    """Return the workers of a model that lack a capability, so that they could not decode a desired state with it.

    The desired state is one message for the whole model, so one such worker counts. A starting worker has
    published no capabilities yet, and is left out.
    """
    return tuple(
        sorted(
            worker.worker
            for worker in workers
            if worker.model == model
            and worker.capabilities is not None
            and not getattr(worker.capabilities, capability)
        )
    )


def pin(command: Load, staged: Mapping[str, Ack], unable: Collection[str]) -> tuple[Load, tuple[str, ...]]:
    """Return the command with the digest and the real path that the workers found, and warnings.

    Args:
        staged: the acks of the workers that staged the source.
        unable: the result of `without` for `weight_digests`.

    Raises:
        ControlError: `other_content`: workers found different content at one source, or other content than the digest
            of `command`.
    """
    groups: dict[str, list[str]] = {}
    for worker, ack in sorted(staged.items()):
        if ack.digest is not None:
            groups.setdefault(ack.digest, []).append(worker)
    if command.digest is not None:
        groups.setdefault(command.digest, ["the command"])
    if len(groups) > 1:
        shown = "; ".join(f"{digest} on {_names(workers)}" for digest, workers in groups.items())
        raise ControlError(
            ControlCode.OTHER_CONTENT,
            f"workers found different content at {command.source}: {shown}; allowed: the same tensors on all workers, "
            "in files that no program changes",
        )
    paths = {ack.path for ack in staged.values()}
    if command.source.path is not None and len(paths) == 1 and (path := next(iter(paths))) is not None:
        command = replace(command, source=WeightSource(path=path))
    silent = sorted({*unable, *(worker for worker, ack in staged.items() if ack.digest is None)})
    if silent:
        why = f"{_names(silent)} cannot compare digests (an earlier release, or an engine on several machines)"
    elif not groups:
        why = "no worker has read its source yet"
    else:
        return replace(command, digest=next(iter(groups))), ()
    return replace(command, digest=None), (f"version {command.version} is unpinned: {why}",)


def unpinned(state: DesiredState) -> list[str]:
    """Return a line for each recorded version of weights or of an adapter that has no digest."""
    lines = set()
    for registers in (state.registers, *state.workers.values()):
        for recorded in registers.values():
            match recorded.command:
                case UpdateWeights(digest=None, version=version):
                    lines.add(f"version {version} of {state.model} is unpinned: no load can prove its content")
                case LoadLora(digest=None, version=version, name=name):
                    lines.add(f"version {version} of adapter {name} is unpinned: no load can prove its content")
    return sorted(lines)


def _names(workers: Collection[str]) -> str:
    names = list(workers)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
