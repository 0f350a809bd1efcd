"""The original's train_isaac_async_v2.py: one collector beside the learner, and a queue of batches.

freerun's mode `batch`; all of its flags are understood here too:
    python scripts/train_isaac_async_v2.py --task Isaac-Cartpole-Direct --num_envs 4096 --num_steps_per_env 24 \
        --max_queue_size 10 --device cuda:0 --headless
"""

import sys

from isaac_training import train

WITHOUT = {
    "--num-collectors": "there is one, with all environments",
    "--collection-batch-size": "a batch is --num_steps_per_env steps of each environment",
}

if __name__ == "__main__":
    raise SystemExit(train("batch", WITHOUT, sys.argv[1:]))
