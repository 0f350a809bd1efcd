"""Gymnasium's SyncVectorEnv: all environments in one process, for steps too short to be worth a message."""

from __future__ import annotations

from functools import partial

import gymnasium_async
import measuring
from gymnasium.vector import SyncVectorEnv

if __name__ == "__main__":
    measuring.run(partial(gymnasium_async.collecting, vector=SyncVectorEnv), __doc__)
