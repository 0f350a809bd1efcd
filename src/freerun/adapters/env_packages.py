"""Messages about environment ids that Gymnasium does not know: which package registers one, or what was meant."""

from __future__ import annotations

import difflib
import importlib.util
import re
from typing import NamedTuple

import gymnasium


class Package(NamedTuple):
    """A package with environments, and its module that registers them when it is imported."""

    install: str
    module: str


PACKAGES = {
    r"ALE/|\w+NoFrameskip-v": Package("ale-py", "ale_py"),
    r"MiniGrid-|BabyAI-": Package("minigrid", "minigrid"),
    r"(highway|merge|roundabout|parking|intersection|racetrack|exit|two-way|u-turn)(-\w+)*-v": Package(
        "highway-env", "highway_env"
    ),
    r"PyFlyt/": Package("pyflyt", "PyFlyt.gym_envs"),
    r"Fetch|Hand(Reach|Manipulate)|AdroitHand|FrankaKitchen|PointMaze_|AntMaze_": Package(
        "gymnasium-robotics", "gymnasium_robotics"
    ),
    r"Panda(Reach|Push|Slide|PickAndPlace|Stack|Flip)": Package("panda-gym", "panda_gym"),
}
"""Well-known packages, by a pattern that the beginnings of their ids match."""


def unregistered(env: str) -> str:
    """One sentence about an id that Gymnasium does not know: which package registers it, or what was meant."""
    module, _, name = env.rpartition(":")
    namespace = name.rpartition("/")[0]
    package = next((package for start, package in PACKAGES.items() if re.match(start, name)), None)
    if package is not None and module != package.module:
        is_there = importlib.util.find_spec(package.module.partition(".")[0]) is not None
        first = "" if is_there else f"pip install {package.install}, and "
        return (
            f"environment {name!r} is registered by the package {package.install}: {first}name it as "
            f"{package.module}:{name}, so that every worker imports {package.module}"
        )
    # Ids of another namespace are never suggested: they are other environments, however similar the names are.
    candidates = [known for known in gymnasium.registry if not namespace or known.startswith(f"{namespace}/")]
    if namespace and not candidates:
        return (
            f"the namespace {namespace!r} of environment {name!r} is not registered: install the package that "
            f"registers it, and name its module too, as in some_module:{name}"
        )
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(close)}?" if close else "`freerun list` names some"
    return f"there is no environment {env!r}: {advice} (your own: module:callable)"


def not_installed(env: str, error: Exception) -> str | None:
    """The command that installs the package of an id of the form module:id, if that is what is missing."""
    module = env.rpartition(":")[0]
    cause = error.__cause__ or error  # Gymnasium wraps the import error in one of its own
    if module and isinstance(cause, ImportError) and cause.name == module.partition(".")[0]:
        return next((f"pip install {each.install}" for each in PACKAGES.values() if each.module == module), None)
    return None
