"""Environments: Gymnasium's, a user's own, and the built-in ones, which are registered here."""

import gymnasium

BUILT_IN = {
    "freerun/Straggler-v0": (
        "freerun.envs.straggler:Straggler",
        "52 observations, 145 actions; steps take 10 ms on average and up to 50 ms: a slow, uneven simulator",
    ),
}
OTHERS = {
    "any Gymnasium id": "CartPole-v1, LunarLander-v3 (freerun[box2d]), HalfCheetah-v5 (freerun[mujoco]), …",
    "module:callable": "your own: a class or function that returns a gymnasium.Env",
}

for _name, (_entry_point, _) in BUILT_IN.items():
    if _name not in gymnasium.registry:
        gymnasium.register(_name, entry_point=_entry_point)
