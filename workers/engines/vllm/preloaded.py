"""Imports the modules of an engine core into the fork server, from which engine cores are forked. See `processes`."""

import gc
import os
import signal

# Only the worker handles a Ctrl-C.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# Programs read the worker's stdout, and the imported modules may print. Send their output to stderr.
os.dup2(2, 1)
# Most objects of these imports stay, so the garbage collector need not scan them, here or in a forked process.
gc.disable()
try:
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    from . import processes  # noqa: F401
finally:
    gc.freeze()
    gc.enable()
