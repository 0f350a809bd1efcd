"""The original's executor_async_train_workflow_rl.py: a process pool hands over whole episodes as each finishes.

freerun's mode `executor`; all of its flags are understood here too.
"""

from original_flags import train

if __name__ == "__main__":
    raise SystemExit(train("executor", {"--episodes-per-update": "100", "--red-agent": "B_lineAgent"}))
