"""The original's ray_async_train_workflow_rl.py: Ray actors, on one machine or many.

It runs freerun's mode `ray` and takes all of freerun's flags, too. The defaults are 100 workers, 100,000 episodes,
100 episodes per update.
"""

import sys

from original_flags import train

if __name__ == "__main__":
    raise SystemExit(train("ray", sys.argv[1:]))
