"""The original's async_train_workflow_rl.py: workers hand over whole episodes as each finishes.

freerun's mode `pipes`; all of its flags are understood here too.
"""

from original_flags import train

if __name__ == "__main__":
    raise SystemExit(train("pipes", {"--episodes-per-update": "100", "--red-agent": "B_lineAgent"}))
