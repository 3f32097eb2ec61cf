"""A history of commands, acks and frames, which checks that workers act as their acks state (I4, I5)."""

from dataclasses import dataclass, field

from rollbus.bus.protocol.fleet.desired import effective
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import DesiredState
from rollbus.schemas.errors import InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import Frame, decode_ack, decode_command, decode_desired, decode_frame

PAUSE, WEIGHTS = "pause", "weights"
REGISTERS = {"pause": PAUSE, "update_weights": WEIGHTS, "finish_weight_update": WEIGHTS}
"""The register of each command that limits the frames of a worker after the worker has applied it."""
REFUSED = "unreadable"
"""The command name in the ack of a worker that could not decode the command."""


@dataclass
class Promise:
    """A command that a worker has acked as applied and that no later command has overtaken."""

    ack: Ack
    register: str
    links: dict[str, int] = field(default_factory=dict)
    """Number of frames sent before the ack, by `<client>/<incarnation>`. A worker may send these frames again."""


class ControlHistory:
    """Receives all command messages, acks and frames of one fleet in the server's order.

    When a later command or a write of the desired state arrives, the promise of the earlier command ends. So the
    history reports no false violation, but it checks nothing between that moment and the next ack.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        """Violations in readable form; empty if all workers acted as their acks state."""
        self._accepted: dict[tuple[str, str, str], str] = {}
        self._finals: dict[tuple[str, str, str], Ack] = {}
        self._promises: dict[tuple[str, str], Promise] = {}
        self._desired: dict[str, DesiredState] = {}
        self._numbers: dict[str, dict[str, int]] = {}

    @property
    def num_answered(self) -> int:
        """Number of commands with a final ack, counted for each incarnation of each worker."""
        return len(self._finals)

    def unanswered(self, incarnations: set[str]) -> list[str]:
        """Return the accepted commands of these incarnations without a final ack, as worker and command name."""
        return sorted(
            f"{worker} {command}"
            for (worker, incarnation, command_id), command in self._accepted.items()
            if incarnation in incarnations and (worker, incarnation, command_id) not in self._finals
        )

    def take(self, subject: str, data: bytes) -> None:
        """Record a message; ignore it if it cannot be decoded."""
        tokens = subject.split(".")
        try:
            if tokens[0] == "$KV":
                self._add_desired(data)
            elif len(tokens) < 5:
                return  # answers to requests of the observer itself
            elif tokens[3] == "control":
                self._add_command(data)
            elif tokens[3] == "ack":
                self._add_ack(decode_ack(data))
            elif tokens[3] == "frame":
                self._add_frame(tokens[4], decode_frame(data))
            elif tokens[3] == "plain":
                self._add_frame("", decode_frame(data))
        except (InvalidRequest, RemoteProtocolError):
            return

    def _add_command(self, data: bytes) -> None:
        command = decode_command(data)
        for key, promise in list(self._promises.items()):
            ack = promise.ack
            is_meant = command.model in (None, ack.model) and ack.worker in (command.workers or (ack.worker,))
            is_news = (ack.worker, ack.incarnation, command.id) not in self._finals
            if command.register == promise.register and is_meant and is_news:
                del self._promises[key]

    def _add_desired(self, data: bytes) -> None:
        try:
            state = decode_desired(data)
        except RemoteProtocolError:
            self._promises.clear()  # deleted or invalid: the behavior of the workers is undefined
            return
        self._desired[state.model] = state
        for key, promise in list(self._promises.items()):
            recorded = effective(state, promise.ack.worker).get(promise.register)
            if promise.ack.model == state.model and (recorded is None or recorded.command.id != promise.ack.id):
                del self._promises[key]

    def _add_ack(self, ack: Ack) -> None:
        key = ack.worker, ack.incarnation, ack.id
        final = self._finals.get(key)
        if ack.status is AckStatus.ACCEPTED:
            self._accepted[key] = ack.command
        if not ack.status.is_final:
            if final is not None:
                self.problems.append(f"{ack.worker} said {ack.status} of {ack.command} after {final.status} (I5)")
            return
        if final is None:
            self._finals[key] = ack
        elif ack != final and (ack.command != REFUSED or ack.error != final.error):
            self.problems.append(f"{ack.worker} said {ack.status} of {ack.command} after {final.status} (I5)")
        register = REGISTERS.get(ack.command)
        if final is not None or ack.status is not AckStatus.APPLIED or register is None:
            return
        if not self._is_overtaken(ack, register):
            sent = {**self._numbers.get(ack.incarnation, {}), **(ack.frames or {})}
            self._promises[ack.incarnation, register] = Promise(ack, register, sent)

    def _is_overtaken(self, ack: Ack, register: str) -> bool:
        """Return True if a later command was recorded before this ack.

        The worker may already have read the later command from the desired state.
        """
        state = self._desired.get(ack.model)
        recorded = None if state is None else effective(state, ack.worker).get(register)
        return recorded is not None and ack.epoch is not None and recorded.epoch > ack.epoch

    def _add_frame(self, client: str, frame: Frame) -> None:
        link = f"{client}/{frame.client_incarnation}"
        numbers = self._numbers.setdefault(frame.incarnation, {})
        numbers[link] = max(numbers.get(link, 0), frame.number + 1)
        versions = {chunk.weight_version for chunk in frame.chunks if chunk.num_tokens}
        if not versions:
            return
        for register in (PAUSE, WEIGHTS):
            promise = self._promises.get((frame.incarnation, register))
            if promise is None or frame.number < promise.links.get(link, 0):
                continue
            ack = promise.ack
            if register == PAUSE:
                self.problems.append(f"{ack.worker} published tokens in frame {frame.number} while paused (I4)")
            elif versions != {ack.weight_version}:
                self.problems.append(
                    f"{ack.worker} published tokens of versions {sorted(versions)} in frame {frame.number} after its "
                    f"update to {ack.weight_version} (I4)"
                )
