"""For the process that engine cores are forked from: importing this imports what an engine core does. See `preload`."""

import gc
import os
import signal

# A Ctrl-C is for the worker.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# The worker's stdout is for machines to read; who is imported here may print.
os.dup2(2, 1)
# Most of what is made now stays: the garbage collector need not look for more in it, now or in any forked process.
gc.disable()
try:
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    from . import ownership  # noqa: F401
finally:
    gc.freeze()
    gc.enable()
