"""Exit codes of a worker process that the programs which start workers act on."""

from typing import Final

__all__ = ["EXIT_DUPLICATE_WORKER"]

EXIT_DUPLICATE_WORKER: Final = 78
"""Another live worker has the same id: a restart cannot help, so no supervisor restarts the process."""
