"""A node that steers a robot: an observation per line of JSON comes in, an action per line goes out.

    freerun export RUN_DIR --to numpy --frequency 50
    sensors | python examples/policy_node.py RUN_DIR/export/policy.npz | motors

It needs numpy and Gymnasium, but neither torch nor the environment.
"""

import json
import sys
from pathlib import Path

import freerun

path = Path(sys.argv[1])
contract = json.loads(Path(f"{path}.json").read_text())
print("actions per second:", contract["frequency_hz"] or "not known", file=sys.stderr)
policy = freerun.load_policy(path)
for line in sys.stdin:
    action = policy.predict(json.loads(line))
    print(json.dumps(action if isinstance(action, int) else action.tolist()), flush=True)
