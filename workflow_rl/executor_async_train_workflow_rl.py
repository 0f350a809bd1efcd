"""The original's executor_async_train_workflow_rl.py: a process pool hands over whole episodes as each finishes.

It runs freerun's mode `executor` and takes all of freerun's flags, too. The defaults are 100 workers, 100,000
episodes, 100 episodes per update.
"""

import sys

from original_flags import train

if __name__ == "__main__":
    raise SystemExit(train("executor", sys.argv[1:]))
