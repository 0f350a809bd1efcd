"""How long a policy takes for one action: what a smaller network, or one for a whole batch, would save a worker."""

from __future__ import annotations

import time

import numpy as np

from freerun.core import BatchablePolicy, EnvSpec, Policy

NUM_CALLS = 3


def act_seconds(policy: Policy, spec: EnvSpec) -> float:
    """Return the seconds of one action, on one thread of this machine; 0 for a policy whose network cannot be batched.

    The fastest of a few calls counts, because other programs can only make a call slower."""
    if not isinstance(policy, BatchablePolicy):
        return 0.0
    # Ones, because a mask of zeros would allow no action.
    obs = np.ones(spec.observation_space.shape, spec.observation_space.dtype)
    noise, head = policy.draw(np.random.default_rng(0), 1)[0], np.zeros(policy.head_size, np.float32)
    act, found = policy.single(), []
    for _ in range(NUM_CALLS):
        started = time.perf_counter()
        act(obs, noise, head)
        found.append(time.perf_counter() - started)
    return min(found)
