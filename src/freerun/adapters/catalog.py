"""The environments that freerun knows by name. Importing this module registers the built-in ones with Gymnasium."""

import gymnasium

BUILT_IN = {
    "freerun/Straggler-v0": (
        "freerun_envs.straggler:Straggler",
        "52 observations, 145 actions; steps take 10 ms on average and up to 50 ms: a slow, uneven simulator",
    ),
    "freerun/NetworkDefence-v0": (
        "freerun_envs.single_network:NetworkDefence",
        "52 observations, 145 actions: defend 13 hosts against a red_agent, in the shape and with the scores of CAGE 2",
    ),
    "freerun/RoughDrone-v0": (
        "freerun_envs.rough_drone:RoughDrone",
        "a quadrotor over rough terrain, 4 continuous actions; task: explore, hover (quick to learn) or waypoint",
    ),
    "freerun/RoughDrone-v1": (
        "freerun_envs.rough_drone:RoughDroneV1",
        "the same drone, but in explore speed costs nothing, so that the return counts what was seen",
    ),
    "freerun/TMaze-v0": (
        "freerun_envs.t_maze:TMaze",
        "2 observations, 3 actions: a signal at the entrance says which way to turn at the end; needs a --memory",
    ),
    "sumo/Intersection-v0": (
        "freerun_envs.sumo_intersection:Intersection",
        "21 observations, 4 actions: the traffic light of a crossing in SUMO (freerun[sumo]; docs/simulators.md)",
    ),
    "grid2op/PowerGrid-v0": (
        "freerun_envs.power_grid:PowerGrid",
        "148 observations, 199 actions: a power grid of 14 substations (freerun[grid2op]; docs/simulators.md)",
    ),
    "cyborg/CAGE2-v0": (
        "freerun.adapters.cyborg:CAGE2",
        "CAGE challenge 2 in your own copy of CybORG (cyborg_path): the same numbers, the original simulator",
    ),
}
VECTORISED = {"freerun/NetworkDefence-v0": "freerun_envs.network_defence:NetworkDefenceVector"}
"""Environments with a `core.VectorEnv` that steps many of them in one call."""
TENSOR_ENVS = {
    "freerun/RoughDrone-v0": "freerun_envs.drone_sim:build",
    "freerun/RoughDrone-v1": "freerun_envs.drone_sim:build",
    "Isaac-": "freerun.adapters.isaac_lab:make",
    "isaac:": "freerun.adapters.isaac_lab:make",
    "mjlab:": "freerun.adapters.mjlab_tasks:make",
    "rsl-rl:": "freerun.adapters.rsl_rl_env:make",
    "object:": "freerun.adapters.tensor_envs:take",
}
"""Environments that some modes step as tensors, and what builds each. A name that ends with "-" or ":" stands for all
names that begin with it. The builder gets the name, num_envs, device, seed and the --env-args."""
ENV_SETTINGS = {
    "freerun/NetworkDefence-v0": "freerun_envs.defence_settings:DefenceSettings",
    "cyborg/CAGE2-v0": "freerun.adapters.cyborg_settings:CAGE2Settings",
}
"""Environments with settings of their own, as a subclass of `core.EnvSettings`: its fields become flags for them."""
OTHERS = {
    "any Gymnasium id": "CartPole-v1, LunarLander-v3 (freerun[box2d]), HalfCheetah-v5 (freerun[mujoco]), …",
    "module:callable": "your own: a class or function that returns a gymnasium.Env, or a VectorEnv of num_envs",
    "vector:…": "Gymnasium's own vector version of an id, which one call steps: vector:CartPole-v1",
    "envpool:…": "an environment of EnvPool (freerun[envpool])",
    "Isaac-…, isaac:…": "a task of Isaac Lab 2 or 3, where it is installed (docs/isaac.md)",
    "mjlab:…": "a task of mjlab, where it is installed (docs/isaac.md)",
    "rsl-rl:module:callable": "your own: a function that returns an RSL-RL VecEnv (freerun[rsl-rl])",
}

for _name, (_entry_point, _) in BUILT_IN.items():
    # Gymnasium warns about a second registration.
    if _name not in gymnasium.registry:
        gymnasium.register(_name, entry_point=_entry_point)
