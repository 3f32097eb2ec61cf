"""`rollbus prove`: is what a trainer trains on what was sampled, on this model and on these machines?

The command runs stages. Each stage has a name, a bar (what must hold), and a verdict of four words:

- `ok`: measured, and within its limits
- `look`: above a limit, or not covered; a person must look at it
- `wrong`: far above a limit, or a result differs that must be equal. Only this word makes the exit code 1.
- `not run`: not measured, with the reason

**A stage** is a subclass of `stage.Stage`, listed in `command.STAGES`, which is the order of the table.

    class Speed(Stage):
        name, bar = "speed", "the fleet generates at least 0.9 of the tokens/s of its engine"
        changes_fleet = True            # with --nats it runs only with --disruptive
        conclude_share = 1.0            # part of the minutes for `conclude`; 0.0: the stage has no such phase

        def refusal(self, proof): return None if ... else "the reason why it cannot run here"
        async def measure(self, proof): ...      # with `proof.rb`, while the fleet that all stages share runs
        async def conclude(self, proof): ...     # after it has stopped, if it is the command's own: the GPU is free

Each phase returns None or an `Outcome`: findings with numbers, a headline of a few words for the table, and details for
the JSON. Outcomes of both phases are joined. Each phase gets a part of the minutes: `proof.seconds_left()`. A phase
that takes longer is cancelled (`not run`). A phase may raise `StageRefused(reason)`: `not run`. Any other
`RollbusError` or `OSError` is a fault of the fleet: `wrong`, with the error's text.

`proof.own_fleet(num_workers=2, num_prefill=1, flags=(...))` starts a fleet for one stage and yields its `FleetInUse`.
Call it only in `conclude`, and only if `proof.is_own`: before that, the shared fleet has the GPUs. `proof.scratch` is a
directory below a weight root of every own worker, and is deleted at the end. `proof.folder` has the checkpoint.

**Verdicts** are pure: `verdicts.limit_of(figure, dtype, floor)` returns the limit, the larger of a table by dtype and
three times the floor, and `verdicts.measured(...)` returns the finding for a number. `report.Report` is the JSON.
"""
