"""The original's train_isaac_async_v2.py: one collector that works while the learner updates, and a queue of batches.

It runs freerun's mode `batch` and takes all of freerun's flags, too:
    python scripts/train_isaac_async_v2.py --task Isaac-Cartpole-Direct --num_envs 4096 --num_steps_per_env 24 \
        --max_queue_size 10 --device cuda:0 --headless
"""

import sys

from isaac_training import train

WITHOUT = {
    "--num-collectors": "there is one collector, with all environments",
    "--collection-batch-size": "a batch is --num_steps_per_env steps of each environment",
}

if __name__ == "__main__":
    raise SystemExit(train("batch", WITHOUT, sys.argv[1:]))
