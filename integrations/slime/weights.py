"""The hook that slime and vime call when the checkpoint of a version is written, and before engines read it."""

import logging
import os
import re
from pathlib import Path
from typing import Any, Final

from ...schemas.errors import InvalidRequest
from ...schemas.limits import MAX_WEIGHT_VERSION
from ..publisher import WORKERS_WAIT_S, update_fleet
from .connection import connect, read_settings

logger = logging.getLogger(__name__)

FOLDER: Final = re.compile(r"weight_v(?P<number>[0-9]{1,18})")
"""Name of a version's folder, for example `weight_v000012`."""


def version_of(version_dir: str, present: int) -> tuple[int, str | None]:
    """Return the fleet's version for a folder of slime, and slime's number as a label if it is another one.

    slime counts from 1 in each run. The fleet's versions only rise: in a later run, the fleet's next version is used.

    Args:
        version_dir: folder that slime has written.
        present: the fleet's newest version.

    Raises:
        InvalidRequest: the folder has no number, or the version would be too large.
    """
    found = FOLDER.fullmatch(Path(version_dir).name)
    if found is None:
        raise InvalidRequest(
            field="version_dir", problem=f"is {version_dir!r}", allowed="a folder such as weight_v000012"
        )
    number = int(found["number"])
    version = number if number > present else present + 1
    if version > MAX_WEIGHT_VERSION:
        raise InvalidRequest(
            field="version_dir", problem=f"gives version {version}", allowed=f"up to {MAX_WEIGHT_VERSION}"
        )
    return version, None if version == number else str(number)


def check_arguments(args: Any) -> None:
    """Reject arguments with which slime writes no whole checkpoint.

    Raises:
        InvalidRequest: the mode is not `full`.
    """
    mode = getattr(args, "update_weight_mode", "full")
    if mode != "full":
        allowed = "full: workers load whole checkpoints, and rollbus.WeightPublisher makes deltas of its own"
        raise InvalidRequest(field="update_weight_mode", problem=f"is {mode!r}", allowed=allowed)


def rank_of(environment: dict[str, str] | os._Environ[str] = os.environ) -> int:
    """Return the rank of this process: slime calls its hook on each."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(environment.get("RANK", "0"))


def update_weights(args: Any, version_dir: str, rollout_engines: Any) -> None:
    """Load the checkpoint that slime has written into all workers: `--custom-update-weight-post-write-path`.

    Rank 0 sends the update and waits until each live worker has loaded and verified it. The other ranks return, and
    wait in slime's own barrier. Training fails if a worker rejects the weights.

    Args:
        args: slime's arguments, with the same `rollbus_*` attributes as `generate`.
        version_dir: folder of the checkpoint, below a `--weight-root` of each worker.
        rollout_engines: engines of slime, which load the weights afterwards.

    Raises:
        InvalidRequest: the arguments or the folder's name are wrong.
        CommandIncomplete: a live worker has not loaded the version.
        NoWorkers: no worker served the model within ten minutes.
    """
    check_arguments(args)
    settings = read_settings(args)
    if rank_of() != 0:
        return
    with connect(settings) as client:
        client.fleet.wait_for_workers(1, model=settings.model, timeout_s=WORKERS_WAIT_S)
        workers = [worker for worker in client.fleet.workers if settings.model in (None, worker.model)]
        version, label = version_of(version_dir, max(worker.weight_version for worker in workers))
        path = str(Path(version_dir).resolve())
        update_fleet(client, version=version, path=path, label=label, model=settings.model)
    logger.info("slime.weights_updated version=%d folder=%s", version, version_dir)
