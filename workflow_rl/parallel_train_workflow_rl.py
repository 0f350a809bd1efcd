"""The original's parallel_train_workflow_rl.py: a process per environment, all stepped together.

freerun's mode `sync`; all of its flags are understood here too.
"""

from original_flags import train

if __name__ == "__main__":
    raise SystemExit(train("sync", {"--episodes-per-update": "100", "--red-agent": "B_lineAgent"}))
