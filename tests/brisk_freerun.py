"""`freerun` with shorter pauses before a worker is started again: `python -m brisk_freerun train ...`.

A worker that is killed nine times in a row would otherwise wait up to 5 seconds before each start.
tests/collecting/test_restart_policy.py checks how the pauses grow, without waiting for them.
"""

from __future__ import annotations

import sys

from freerun.collecting.workers import restart_policy
from freerun.tools.cli.main import main

MAX_PAUSE_SECONDS = 0.1

if __name__ == "__main__":
    restart_policy.MAX_PAUSE_SECONDS = MAX_PAUSE_SECONDS
    sys.exit(main())
