"""`freerun` with shorter waits, for programs that tests start: `python -m brisk_freerun train ...`.

A worker that is killed nine times in a row would otherwise wait up to 5 seconds before each start, a display would say
only after 5 seconds what the run waits for, and an update that never ends would go on for 2 seconds after Ctrl-C.
tests/collecting/test_restart_policy.py checks how the pauses grow, without waiting for them.
"""

from __future__ import annotations

import sys

from freerun.collecting.workers import restart_policy
from freerun.telemetry import waiting
from freerun.tools.cli.main import main
from freerun.transport import signals

if __name__ == "__main__":
    restart_policy.MAX_PAUSE_SECONDS = 0.1
    waiting.SILENT_SECONDS = waiting.REPEAT_SECONDS = 0.5
    waiting.POLL_SECONDS = 0.05
    signals.GRACE_SECONDS = 0.5
    sys.exit(main())
