"""The original's train_isaac_async.py: collectors that never wait, and a queue that drops the oldest.

It runs freerun's mode `continuous` and takes all of freerun's flags, too:
    python scripts/train_isaac_async.py --task Isaac-Cartpole-Direct --num_envs 64 --num_collectors 4 \
        --max_queue_size 1000 --collection_batch_size 256 --device cuda:0 --headless
"""

import sys

from isaac_training import train

WITHOUT = {"--num-steps-per-env": "a collector hands over --collection_batch_size steps at a time"}

if __name__ == "__main__":
    raise SystemExit(train("continuous", WITHOUT, sys.argv[1:]))
