"""`python -m freerun` is the `freerun` command."""

import sys

from freerun.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
