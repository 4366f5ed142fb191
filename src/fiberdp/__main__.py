"""python -m fiberdp: the command line."""

import sys

from fiberdp.cli import main

sys.exit(main())
