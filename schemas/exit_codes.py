"""Exit codes of a worker process. The programs that start workers act on them."""

from typing import Final

__all__ = ["EXIT_DUPLICATE_WORKER"]

EXIT_DUPLICATE_WORKER: Final = 78
"""Another live worker has the same id. A restart cannot help, so no supervisor restarts the process."""
