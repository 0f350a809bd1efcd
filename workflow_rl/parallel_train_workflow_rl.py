"""The original's parallel_train_workflow_rl.py: a process per environment, all stepped together.

It runs freerun's mode `sync` and takes all of freerun's flags, too. The defaults are 100 environments, 100,000
episodes, 100 episodes per update.
"""

import sys

from original_flags import train

if __name__ == "__main__":
    raise SystemExit(train("sync", sys.argv[1:]))
