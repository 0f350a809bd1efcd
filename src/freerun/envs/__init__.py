"""Environments: Gymnasium's, a user's own, and the built-in ones, which are registered here."""

import gymnasium

BUILT_IN = {
    "freerun/Straggler-v0": (
        "freerun.envs.straggler:Straggler",
        "52 observations, 145 actions; steps take 10 ms on average and up to 50 ms: a slow, uneven simulator",
    ),
    "freerun/NetworkDefence-v0": (
        "freerun.envs.network_defence:NetworkDefence",
        "52 observations, 145 actions: defend 13 hosts against a red_agent, in the shape and with the scores of CAGE 2",
    ),
    "freerun/RoughDrone-v0": (
        "freerun.envs.rough_drone:RoughDrone",
        "a quadrotor over rough terrain, 4 continuous actions; task: explore, hover (quick to learn) or waypoint",
    ),
    "cyborg/CAGE2-v0": (
        "freerun.envs.cyborg:CAGE2",
        "CAGE challenge 2 in your own copy of CybORG (cyborg_path): the same numbers, the original simulator",
    ),
}
VECTORISED = {"freerun/NetworkDefence-v0": "freerun.envs.network_defence:NetworkDefenceVector"}
"""Environments of which many are stepped in one call, as a `core.VectorEnv`."""
TENSOR_ENVS = {
    "freerun/RoughDrone-v0": "freerun.envs.drone_sim:build",
    "Isaac-": "freerun.envs.isaac_lab:make",
    "isaac:": "freerun.envs.isaac_lab:make",
    "rsl-rl:": "freerun.envs.rsl_rl:make",
    "object:": "freerun.envs.tensors:take",
}
"""Environments that are tensors in the modes for that: by name, or all whose names begin so (with "-" or ":" at the
end), and what builds one, given the name, num_envs, device, seed and --env-args."""
CYBER_ENVS = ("freerun/NetworkDefence-v0", "cyborg/CAGE2-v0")
"""Those that --red-agent, --episode-steps and --workflow are for."""
OTHERS = {
    "any Gymnasium id": "CartPole-v1, LunarLander-v3 (freerun[box2d]), HalfCheetah-v5 (freerun[mujoco]), …",
    "module:callable": "your own: a class or function that returns a gymnasium.Env",
    "Isaac-…, isaac:…": "a task of Isaac Lab 2 or 3, where it is installed (docs/isaac.md)",
    "rsl-rl:module:callable": "your own: a function that returns an RSL-RL VecEnv (freerun[rsl-rl])",
}

for _name, (_entry_point, _) in BUILT_IN.items():
    if _name not in gymnasium.registry:
        gymnasium.register(_name, entry_point=_entry_point)
