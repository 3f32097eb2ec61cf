"""The lease of a transfer of weights: when it ends, who may continue it, and which finish is refused beforehand."""

import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.leases import OWNER_LOST_S, TransferLease, check_any_can_finish, check_continues
from rollbus.schemas.control import FinishWeightUpdate
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.options import DEFAULT_IDLE_S
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.schemas.weights import OpenTransfer
from tests.golden.vectors import VECTORS

FINISH = FinishWeightUpdate(version=7)
OPEN = OpenTransfer(id="t", by="c", age_s=12.0, chunks=1)


def worker(transfer: OpenTransfer | None, *, is_older: bool = False, version: int = 1) -> WorkerPresence:
    """Return a worker with an open transfer, or of a release that announces none."""
    serving = VECTORS["presence_serving"]
    assert isinstance(serving, WorkerPresence)
    assert serving.capabilities is not None
    able = replace(serving.capabilities, transfer_leases=not is_older)
    return replace(serving, state=WorkerState.UPDATING, capabilities=able, transfer=transfer, weight_version=version)


def refusal(*workers: WorkerPresence, by: str = "c", transfer: str | None = None) -> ControlCode | None:
    """Return the code with which a finish is refused before it is recorded; None: it is recorded."""
    try:
        check_any_can_finish(workers, replace(FINISH, transfer=transfer), by)
    except ControlError as error:
        assert error.message.startswith("nothing was changed: ")
        return error.code
    return None


def test_silence_and_a_lost_owner_end_a_lease() -> None:
    """A command in progress is not silence, but the loss of its owner ends it too. Without presence, silence counts."""
    lease = TransferLease("t", "c", 0.0, 0.0)
    assert lease.end(DEFAULT_IDLE_S, DEFAULT_IDLE_S) is None
    assert "sent no command for 600 s" in str(lease.end(DEFAULT_IDLE_S + 1, DEFAULT_IDLE_S))
    lease.is_busy = True
    assert lease.end(10 * DEFAULT_IDLE_S, DEFAULT_IDLE_S) is None
    assert lease.describe(1.0, DEFAULT_IDLE_S).left_s == 0
    lease.note_presence(5.0)
    lease.note_presence(None)
    lease.note_presence(3.0)
    assert lease.end(5.0 + OWNER_LOST_S, DEFAULT_IDLE_S) is None
    assert "published no presence for 20 s" in str(lease.end(5.1 + OWNER_LOST_S, DEFAULT_IDLE_S))


@pytest.mark.parametrize(
    ("found", "transfer", "by", "code"),
    [
        (OPEN, None, "c", None),
        (OPEN, "t", "c", None),
        (OPEN, "u", "c", ControlCode.TRANSFER_EXPIRED),
        (OPEN, "t", "d", ControlCode.TRANSFER_HELD),
        (None, "t", "c", ControlCode.TRANSFER_EXPIRED),
        (None, None, None, ControlCode.TRANSFER_EXPIRED),
    ],
)
def test_only_the_owner_continues_the_open_transfer(
    found: OpenTransfer | None, transfer: str | None, by: str | None, code: ControlCode | None
) -> None:
    """A command without an id continues any transfer of its owner. Errors name the holder and the age."""
    if code is None:
        check_continues(found, transfer, by)
        return
    with pytest.raises(ControlError, match="of c, opened 12 s ago" if found else "start it again") as caught:
        check_continues(found, transfer, by)
    assert caught.value.code is code


def test_a_finish_is_recorded_only_if_a_worker_can_apply_it() -> None:
    """One worker with a chunk suffices. A repeated finish passes, and so does a worker that announces no transfers."""
    empty = replace(OPEN, chunks=0)
    assert refusal(worker(OPEN), worker(None)) is None
    assert refusal(worker(empty), worker(OPEN)) is None
    assert refusal(worker(None, version=7)) is None
    assert refusal(worker(None, is_older=True), worker(empty)) is None
    assert refusal(worker(empty), worker(None)) is ControlCode.TRANSFER_EMPTY
    assert refusal(worker(None)) is ControlCode.TRANSFER_EXPIRED
    assert refusal(worker(OPEN), by="http:admin") is ControlCode.TRANSFER_HELD
    assert refusal(worker(OPEN), transfer="u") is ControlCode.TRANSFER_EXPIRED
