"""`cyborg/CAGE2-v0`: the network-defence game of CAGE challenge 2, in the user's own copy of CybORG.

Sources: https://github.com/cage-challenge/CybORG and https://github.com/cage-challenge/cage-challenge-2 (scenario 2).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from freerun.core import FloatArray, UserError
from freerun.transport import processes

NUM_BITS = 52  # 13 hosts × (2 bits of activity + 2 bits of compromise)
NUM_ACTIONS = 145  # Sleep, Monitor, and 13 hosts × (Analyse, Remove, Restore, 8 kinds of decoy)
RED_AGENTS = ("B_lineAgent", "RedMeanderAgent", "SleepAgent")
PATH_VARIABLE = "CYBORG_PATH"
SCENARIO = Path("CybORG", "Shared", "Scenarios", "Scenario2.yaml")
FAST = "freerun.adapters.cyborg_fast"
DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Modules that are installed by a package of another name."""
ADVICE = (
    "clone https://github.com/cage-challenge/cage-challenge-2 and give the folder CybORG in it as --cyborg-path, "
    f"or in the environment variable {PATH_VARIABLE}"
)

_lock = threading.RLock()
"""CybORG draws from Python's global generator, so only one environment per process may step at a time. The lock is
reentrant because building an environment resets it."""


class OwnRandom:
    """A stream of random numbers of one environment, although CybORG draws from Python's global generator.

    Inside `with`, the global generator continues this stream. Afterwards it continues its own, as if nothing had been
    drawn.
    """

    def __init__(self, seed: int):
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seed the stream as CybORG's `set_seed` seeds the global generator."""
        self._state = random.Random(seed).getstate()

    def __enter__(self) -> None:
        _lock.acquire()
        self._outside = random.getstate()
        random.setstate(self._state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = random.getstate()
        random.setstate(self._outside)
        _lock.release()


class CAGE2(gymnasium.Env[FloatArray, np.int64]):
    """Blue defends a network of 13 hosts against one of CybORG's red agents.

    An observation has four bits per host: the activity that was seen (none 00, scan 10, exploit 11) and what Blue
    knows about its compromise (no 00, unknown 10, user 01, privileged 11). The game has no end, so episodes are
    truncated after `episode_steps`.
    """

    def __init__(
        self,
        red_agent: str = "B_lineAgent",
        episode_steps: int = 100,
        cyborg_path: str | os.PathLike[str] | None = None,
    ):
        if red_agent not in RED_AGENTS:
            close = difflib.get_close_matches(str(red_agent), RED_AGENTS, n=1, cutoff=0.3)
            advice = f"did you mean {close[0]}?" if close else f"use {', '.join(RED_AGENTS)}"
            raise UserError(f"there is no red agent {red_agent!r}: {advice}")
        if episode_steps < 1:
            raise UserError(f"episode_steps must be at least 1, not {episode_steps}")
        self.observation_space = spaces.Box(0.0, 1.0, (NUM_BITS,), np.float32)
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self._episode_steps = episode_steps
        self._num_steps = 0
        self._seeded = False
        # Building draws random numbers, too. The first reset replaces this seed.
        self._random = OwnRandom(0)
        with self._random:
            folder = find(cyborg_path)
            self.simulator = load(folder).Cage2Simulator(getattr(importlib.import_module("CybORG.Agents"), red_agent))
        if (4 * len(self.simulator.hosts), len(self.simulator.actions)) != (NUM_BITS, NUM_ACTIONS):
            raise UserError(f"the CybORG in {str(folder)!r} is not that of CAGE challenge 2: {ADVICE}")
        self.hosts: tuple[str, ...] = tuple(self.simulator.hosts)
        """The names of the hosts, in the order of the observation and of `host_status`."""
        _preload_in_workers(folder)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self._random.seed(int(self.np_random.integers(2**63)) if seed is None else seed)
            self._seeded = True
        self._num_steps = 0
        with self._random:
            return self.simulator.reset(), {}

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        with self._random:
            obs, reward, terminated = self.simulator.step(action)
        self._num_steps += 1
        return obs, reward, terminated, self._num_steps >= self._episode_steps, {}

    def host_status(self) -> NDArray[np.int64]:
        """Red's true access to each host, which Blue does not see: 0 none, 1 as a user, 2 with all privileges."""
        status = self.simulator.host_status()
        return np.array([status.get(host, 0) for host in self.hosts], np.int64)


# ---------------------------------------------------------------------------------------------- finding CybORG


def find(cyborg_path: str | os.PathLike[str] | None) -> Path:
    """The folder to import CybORG from: the given one, that of the environment variable, or the installed package's."""
    given = cyborg_path or os.environ.get(PATH_VARIABLE)
    if given:
        folder = _import_folder(Path(given).expanduser())
        if folder is None:
            source = "cyborg_path" if cyborg_path else PATH_VARIABLE
            raise UserError(f"there is no CybORG of CAGE challenge 2 in {os.fspath(given)!r} ({source}): {ADVICE}")
        return folder
    spec = importlib.util.find_spec("CybORG")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        if folder := _import_folder(place):
            return folder
    if any((place / "Simulator").is_dir() for place in places):
        raise UserError(
            f"the installed CybORG has no {SCENARIO.name}, which `pip install .` leaves out: give the folder that it "
            f"was installed from as cyborg_path, or in the environment variable {PATH_VARIABLE}"
        )
    if spec or importlib.util.find_spec("cyborg"):
        raise UserError(f"the installed package of that name is a web scraper that has nothing to do with it: {ADVICE}")
    raise UserError(f"CybORG is not installed: {ADVICE}")


def _import_folder(folder: Path) -> Path | None:
    """The folder to import CybORG from. A user may also give the repository's root or the package's own folder."""
    candidates = (folder, folder / "CybORG", folder.parent)
    return next((candidate.resolve() for candidate in candidates if (candidate / SCENARIO).is_file()), None)


def load(folder: Path) -> Any:
    """The module `cyborg_fast`, imported with the CybORG of this folder.

    Environments that use another copy keep the modules that they have; only `sys.modules` forgets them."""
    loaded = sys.modules.get(FAST)
    if loaded is not None and loaded.SCENARIO.resolve() == folder / SCENARIO:
        return loaded
    # All modules at once: those of two copies refer to classes of the same names and must not be mixed.
    for name in [name for name in sys.modules if name == FAST or name.partition(".")[0] == "CybORG"]:
        del sys.modules[name]
    try:
        with _importable(folder):
            return importlib.import_module(FAST)
    except ImportError as error:
        missing = str(error.name).partition(".")[0]
        if not isinstance(error, ModuleNotFoundError) or missing == "CybORG":
            raise UserError(f"the CybORG in {str(folder)!r} cannot be used ({error}): {ADVICE}") from None
        raise UserError(
            f"CybORG needs {missing}, which is not installed: pip install {DISTRIBUTIONS.get(missing, missing)} "
            "(pip install 'freerun[cyborg]' installs all that it needs)"
        ) from None


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make CybORG importable. It needs the old gym, for which Gymnasium can stand in; its own warnings are silenced."""
    lacks_gym = "gym" not in sys.modules and importlib.util.find_spec("gym") is None
    if lacks_gym:
        sys.modules["gym"] = gymnasium
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        sys.path.remove(str(folder))
        if lacks_gym:
            del sys.modules["gym"]


def _preload_in_workers(folder: Path) -> None:
    """Let the fork server import CybORG and parse its scenario once: workers then start fast and share the memory."""
    if not processes.is_worker():
        # The fork server and all workers inherit it, and so find the same copy.
        os.environ.setdefault(PATH_VARIABLE, str(folder))
        processes.preload(["freerun.adapters.cyborg_preload"])
