"""The original's async_train_workflow_rl.py: workers hand over whole episodes as each finishes.

It runs freerun's mode `pipes` and takes all of freerun's flags, too. The defaults are 100 workers, 100,000 episodes,
100 episodes per update.
"""

import sys

from original_flags import train

if __name__ == "__main__":
    raise SystemExit(train("pipes", sys.argv[1:]))
