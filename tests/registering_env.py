"""A package that registers environments in a namespace of its own when it is imported, as ale_py does."""

import gymnasium

if "Toys/Audit-v0" not in gymnasium.registry:
    gymnasium.register("Toys/Audit-v0", entry_point="toy_envs:Audit")
