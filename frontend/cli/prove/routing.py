"""The stage `routing`: do the routed experts of a fleet equal those of the reference's routers?"""

from typing import ClassVar

from .causes import DECISIVE, MANY, MISFIT, SOME, Signs, name_causes, precision_cause
from .evidence import Evidence, add_reference, collect
from .figures import Misses, unreached
from .stage import Proof, Stage, StageRefused
from .verdicts import Finding, Number, Outcome, Verdict

MAX_SHOWN = 6
"""Layers that a sentence names. The JSON has all."""


class Routing(Stage):
    """Compares the rows of the answers with the reference's routers."""

    name: ClassVar[str] = "routing"
    bar: ClassVar[str] = "each set of experts equals the router's of the reference, or differs by a tie"
    measure_share: ClassVar[float] = 0.5
    conclude_share: ClassVar[float] = 0.5

    def refusal(self, proof: Proof) -> str | None:
        """Reject a model without routed experts."""
        engine = proof.fleet.engine
        if engine.routed_experts is None:
            return engine.routing_refusal or "the model has no experts"
        return None

    async def measure(self, proof: Proof) -> Outcome | None:
        """Collect the answers, unless `agreement` has."""
        await collect(proof)
        return None

    async def conclude(self, proof: Proof) -> Outcome | None:
        """Run the reference, unless `agreement` has, and judge."""
        return judge_routing(await add_reference(proof), proof.dtype)


def judge_routing(evidence: Evidence, dtype: str) -> Outcome:
    """Return the verdict on the rows. This function is pure.

    Raises:
        StageRefused: nothing could be compared.
    """
    signs = Signs(evidence, dtype)
    refusal = evidence.reference_refusal or evidence.routing_refusal
    if evidence.misfit is not None:
        found = Finding(
            verdict=Verdict.WRONG, what=f"the rows do not fit the routers: {evidence.misfit}", causes=(MISFIT,)
        )
        return Outcome(findings=(found, *_coverage(evidence)), headline="no row fits")
    if signs.misses is None:
        raise StageRefused(f"no reference: {refusal or 'it computed no rows'}")
    misses = signs.misses
    findings = [_sets(evidence, signs, misses), *_precision(signs), *_replay(signs), *_coverage(evidence)]
    equal = sum(misses.equal) / len(misses.equal)
    details = {
        "layers": list(evidence.layers),
        "equal": misses.equal,
        "ties_with_replay": misses.ties,
        "faults_with_replay": misses.faults,
        "rows": misses.rows,
        "unreached": {str(layer): experts for layer, experts in unreached(evidence).items() if experts},
        "replay": {
            name: figures._asdict()
            for name, figures in (("without", signs.free), ("with", signs.replayed))
            if figures is not None
        },
    }
    return Outcome(findings=tuple(findings), headline=f"{equal:.2%} of {misses.rows:,} rows equal", details=details)


def _sets(evidence: Evidence, signs: Signs, misses: Misses) -> Finding:
    worst = max(misses.faults)
    verdict = Verdict.OK if worst <= SOME else Verdict.LOOK if worst <= MANY else Verdict.WRONG
    number = Number(
        name="sets that differ by more than a tie, worst layer",
        value=worst,
        limit=SOME,
        why=f"a miss above {misses.limit:.2g} in the router's logits is no tie: {misses.why}",
    )
    if verdict is Verdict.OK:
        text = f"sets differ only by ties: at most {misses.limit:.2g} in the router's logits ({misses.why})"
        return Finding(verdict=verdict, what=text, numbers=(number,))
    layers = [layer for layer, share in zip(evidence.layers, misses.faults, strict=True) if share > SOME]
    shown = ", ".join(map(str, layers[:MAX_SHOWN])) + (
        f" and {len(layers) - MAX_SHOWN} more" * (len(layers) > MAX_SHOWN)
    )
    text = f"up to {worst:.1%} of the sets differ by more than a tie in layers {shown}, with replay before each"
    return Finding(verdict=verdict, what=text, numbers=(number,), causes=name_causes(signs))


def _precision(signs: Signs) -> list[Finding]:
    """Return a finding if less precise routers explain the answers: no chance makes them fit ten times better."""
    if signs.rounding < DECISIVE:
        return []
    number = Number(name="mean square difference, times smaller with routers in bfloat16", value=signs.rounding)
    text = "the engine's routers are less precise than the reference's"
    return [Finding(verdict=Verdict.WRONG, what=text, numbers=(number,), causes=(precision_cause(signs),))]


def _replay(signs: Signs) -> list[Finding]:
    if signs.free is None or signs.replayed is None:
        return []
    numbers = (
        Number(name="k3 without replay", value=signs.free.k3, unit="nats"),
        Number(name="k3 with replay", value=signs.replayed.k3, unit="nats"),
    )
    text = f"replay of the engine's experts: k3 {signs.free.k3:.2g} without, {signs.replayed.k3:.2g} with it"
    return [Finding(verdict=Verdict.OK, what=text, numbers=numbers)]


def _coverage(evidence: Evidence) -> list[Finding]:
    """Return a finding if no prompt reached some experts: nothing is proven for them."""
    layers = unreached(evidence)
    missing = sum(map(len, layers.values()))
    total = len(layers) * evidence.num_experts
    number = Number(name="experts reached", value=total - missing, unit=f"of {total}")
    if not missing:
        return [Finding(verdict=Verdict.OK, what=f"all {total} experts were reached", numbers=(number,))]
    shown = [f"layer {i}: {', '.join(map(str, experts[:8]))}" for i, experts in layers.items() if experts]
    text = f"{missing} of {total} experts were reached by no prompt, so nothing is proven for them: "
    text += "; ".join(shown[:MAX_SHOWN]) + (f" and {len(shown) - MAX_SHOWN} more layers" * (len(shown) > MAX_SHOWN))
    return [Finding(verdict=Verdict.LOOK, what=text, numbers=(number,))]
