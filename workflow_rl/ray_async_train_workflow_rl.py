"""The original's ray_async_train_workflow_rl.py: Ray actors, on one machine or many.

freerun's mode `ray`; all of its flags are understood here too.
"""

from original_flags import train

if __name__ == "__main__":
    raise SystemExit(train("ray", {"--episodes-per-update": "100", "--red-agent": "B_lineAgent"}))
