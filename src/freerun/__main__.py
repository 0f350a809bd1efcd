"""`python -m freerun` is the `freerun` command."""

import sys

from freerun.cli import main

if __name__ == "__main__":
    sys.exit(main())
