"""Commands on adapters that would have no effect are not recorded."""

from typing import Any

import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.desired import (
    base_adapter,
    check_unload,
    desired_loras,
    effective,
    record,
    served_version,
    set_back,
    target_version,
)
from rollbus.schemas.control import AnyCommand, DesiredState, FinishWeightUpdate, LoadLora, UnloadLora, UpdateWeights
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.weights import WeightSource

SOURCE = WeightSource(path="/a")
STATE, _ = record(DesiredState(model="m"), LoadLora(name="x", source=SOURCE, workers=("a",)))


def test_an_adapter_with_the_name_of_its_model_is_refused() -> None:
    """An adapter with its model's name is rejected: requests with that name use the base weights."""
    with pytest.raises(ControlError, match="the name of the model itself") as error:
        record(STATE, LoadLora(name="m", source=SOURCE))
    assert error.value.code is ControlCode.INVALID_COMMAND


@pytest.mark.parametrize(
    ("command", "loaded"),
    [
        (UnloadLora(name="x"), ()),
        (UnloadLora(name="x", workers=("a",)), ()),
        (UnloadLora(name="y"), ("y",)),
    ],
)
def test_an_adapter_that_is_desired_or_loaded_may_be_unloaded(command: UnloadLora, loaded: tuple[str, ...]) -> None:
    """An unload is allowed if a concerned worker has the adapter, or should have it."""
    check_unload(STATE, command, loaded)


@pytest.mark.parametrize("command", [UnloadLora(name="y"), UnloadLora(name="x", workers=("b",))])
def test_an_unknown_adapter_is_named(command: UnloadLora) -> None:
    """An unload of an adapter that no concerned worker has or should have fails by name."""
    with pytest.raises(ControlError, match=f"adapter '{command.name}' is not loaded") as error:
        check_unload(STATE, command, ())
    assert error.value.code is ControlCode.NOT_FOUND


def test_a_repeated_unload_is_not_an_error() -> None:
    """The same command again is allowed: its first recording counts."""
    command = UnloadLora(name="x")
    after, _ = record(STATE, command)
    check_unload(after, command, ())


def under_the_name(version: int, **fields: Any) -> LoadLora:
    """Return the command to load an adapter under the model's name."""
    return LoadLora(name="m", source=SOURCE, version=version, for_base=True, **fields)


def recorded(*commands: AnyCommand, state: DesiredState = STATE) -> DesiredState:
    """Return the state after these commands."""
    for command in commands:
        state, _ = record(state, command)
    return state


def test_an_adapter_for_the_base_has_the_name_of_its_model() -> None:
    """An adapter for the base with another name is rejected."""
    with pytest.raises(ControlError, match="name is 'x'; allowed: 'm'"):
        record(STATE, LoadLora(name="x", source=SOURCE, for_base=True))


def test_versions_under_a_models_name_do_not_go_back() -> None:
    """Weights and adapters under the model's name share one order of versions, which only a rollback breaks."""
    state = recorded(UpdateWeights(version=4, source=SOURCE), under_the_name(5), under_the_name(7))
    assert served_version(state, "a") == 7
    assert target_version(state, "a") == 4
    for command in (
        under_the_name(6),
        replace(under_the_name(7), source=WeightSource(path="/b")),
        UpdateWeights(version=6, source=SOURCE),
        FinishWeightUpdate(version=7),
    ):
        with pytest.raises(ControlError) as error:
            record(state, command)
        assert error.value.code is ControlCode.OLD_VERSION
    assert served_version(recorded(under_the_name(7), state=state), "a") == 7
    assert served_version(recorded(UpdateWeights(version=1, source=SOURCE, allow_rollback=True), state=state), "a") == 1


@pytest.mark.parametrize(
    "command", [UpdateWeights(version=6, source=SOURCE), FinishWeightUpdate(version=6), UnloadLora(name="m")]
)
def test_new_weights_or_an_unload_end_the_adapter_of_the_base(command: AnyCommand) -> None:
    """New weights, by a checkpoint or a transfer, and an unload end the adapter under the model's name, and no other.

    Weights for one worker end it on this worker. An undo restores it with the weights.
    """
    state = recorded(under_the_name(5))
    after, epoch = record(state, command)
    assert desired_loras(after) == {"x"}
    assert base_adapter(effective(after, "a"), "m") is None
    undone = set_back(after, state, command.register or "", epoch)
    assert served_version(undone, "a") == 5
    assert effective(undone, "a").keys() == effective(state, "a").keys()
    one = recorded(replace(command, workers=("a",), id="other"), state=state)
    assert base_adapter(effective(one, "a"), "m") is None
    assert served_version(one, "b") == 5
