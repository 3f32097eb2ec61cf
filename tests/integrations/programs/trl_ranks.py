"""Program for the trainers' Python: all ranks learn whether rank 0 has published; each prints its error.

python trl_ranks.py
"""

import os
import sys
from types import SimpleNamespace

if "RANK" not in os.environ:
    launch = [sys.executable, "-W", "ignore", "-P", "-m", "torch.distributed.run"]
    os.execv(sys.executable, [*launch, "--standalone", "--nproc-per-node=2", __file__])

from accelerate import PartialState

from rollbus.integrations.trl import PublishPolicy


class PolicyWithoutFleet(PublishPolicy):
    """A callback that publishes nothing and raises an error if `fails` is set."""

    fails = False

    def publish_model(self, model):
        if self.fails:
            raise ValueError("the lease is lost")


ranks = PartialState(cpu=True)
callback = PolicyWithoutFleet(model="policy", checkpoint="none")
step = SimpleNamespace(is_world_process_zero=ranks.is_main_process, global_step=1)
callback.on_step_end(None, step, None, model=None)
callback.fails = True
try:
    callback.on_step_end(None, step, None, model=None)
except (ValueError, RuntimeError) as error:
    print(f"rank {ranks.process_index} of {ranks.num_processes}: {error}", flush=True)
