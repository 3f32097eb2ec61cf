"""Commands on adapters that would have no effect are not recorded."""

import pytest

from rollbus.bus.protocol.fleet.desired import check_unload, record
from rollbus.schemas.control import LoadLora, UnloadLora
from rollbus.schemas.desired import DesiredState
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
