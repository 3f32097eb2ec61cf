"""The policies of models, whose names come from workers."""

from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.placement import ModelPolicies
from tests.protocol.placement.worlds import presence

events = st.lists(st.tuples(st.sampled_from("vw"), st.sampled_from(["a", "b", "c", None])), max_size=20)


@given(events)
def test_a_model_has_a_policy_while_a_worker_has_the_model(events: list[tuple[str, str | None]]) -> None:
    """After any presence and losses, exactly the models of live workers have policies, each with its own workers."""
    policies, live = ModelPolicies(), dict[str, str]()
    for worker, model in events:
        if model is None:
            policies.remove(worker)
            live.pop(worker, None)
        else:
            policies.update(presence(worker, model=model), 0.0)
            live[worker] = model

    assert len(policies) == len(set(live.values()))
    for model in "abc":
        loads = policies.of(model).loads
        assert {worker for worker in "vw" if loads.get(worker) is not None} == {w for w in live if live[w] == model}


def test_a_worker_with_ever_new_models_leaves_one_policy() -> None:
    """A worker that publishes a new model name in each presence message occupies the memory of one model."""
    policies = ModelPolicies()
    for i in range(1000):
        policies.update(presence("w", model=f"m{i}"), float(i))

    assert len(policies) == 1
