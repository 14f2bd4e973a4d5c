"""`python -m remat.cli` is the command line, too."""

import sys

from .entry import main

sys.exit(main())
