"""`python -m rollbus.frontend.cli` is `rollbus`."""

import sys

from .app import main

sys.exit(main())
