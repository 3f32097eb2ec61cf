"""`python -m frontend.cli` is `rollbus`."""

import sys

from frontend.cli.app import main

sys.exit(main())
