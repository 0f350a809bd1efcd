"""`sumo/Intersection-v0`: the traffic light of a crossing in SUMO, by way of sumo-rl and libsumo.

Sources: https://eclipse.dev/sumo and https://github.com/LucasAlegre/sumo-rl, whose crossing this is.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from freerun.core import FloatArray, RequiredPackage, UserError

SUMO = RequiredPackage("sumo_rl", "SUMO, libsumo and sumo-rl", "sumo", also=("sumo", "libsumo"))
CROSSING = Path("nets", "2way-single-intersection")
QUIET = "--no-step-log --duration-log.disable"

_playing: Any = None
"""The environment of sumo-rl that has this process's only simulation. libsumo is a library with global state: a second
simulation takes the place of the first, whose environment would then read the wrong one. This is a strong reference,
because sumo-rl's environments end the simulation of the process, whosever it is, when they are collected as garbage."""


class Intersection(gymnasium.Env[FloatArray, np.int64]):
    """An action chooses the green phase for the next `delta_time` seconds; a change begins with a yellow phase.

    An observation has the phase (one-hot), whether it may change, and the density and the queue of each lane that leads
    to the crossing. The reward is the change of the waiting time of all cars, in units of 100 seconds. A phase must
    last for `min_green` seconds after its yellow: until then, the mask allows it alone. SUMO has no end, so episodes
    are truncated after `num_seconds`.
    """

    def __init__(
        self,
        net_file: str | None = None,
        route_file: str | None = None,
        num_seconds: int = 3600,
        delta_time: int = 5,
        yellow_time: int = 2,
        min_green: int = 5,
        reward_fn: str = "diff-waiting-time",
    ):
        """Without files, this is sumo-rl's crossing of two-way streets, whose heavy traffic changes its direction."""
        SUMO.require("sumo/Intersection-v0")
        if delta_time <= yellow_time:
            raise UserError(f"delta_time ({delta_time}) must be longer than yellow_time ({yellow_time})")
        if (net_file is None) != (route_file is None):
            raise UserError("a net needs its own traffic: give net_file and route_file, or neither of them")
        sumo_rl = _import_sumo_rl()
        folder = Path(sumo_rl.__file__).parent / CROSSING
        files = {
            "net_file": net_file or str(folder / "single-intersection.net.xml"),
            "route_file": route_file or str(folder / "single-intersection-vhvh.rou.xml"),
        }
        for name, file in files.items():
            if not Path(file).is_file():
                raise UserError(f"there is no {name} {file}")
        if reward_fn not in (known := sumo_rl.TrafficSignal.reward_fns):
            raise UserError(f"there is no reward_fn {reward_fn!r}: choose {' or '.join(known)}")
        _end_simulation()  # for this begins one, to look at the net
        self._sumo: Any = sumo_rl.SumoEnvironment(
            **files,
            num_seconds=num_seconds,
            delta_time=delta_time,
            yellow_time=yellow_time,
            min_green=min_green,
            reward_fn=reward_fn,
            single_agent=True,
            sumo_warnings=False,
            additional_sumo_cmd=QUIET,
            # They look at every car again, for an info that no policy sees.
            add_system_info=False,
            add_per_agent_info=False,
        )
        lights = self._sumo.ts_ids
        if len(lights) != 1:
            raise UserError(f"{files['net_file']} has {len(lights)} traffic lights, but Intersection controls one")
        self.observation_space = self._sumo.observation_space
        self.action_space: spaces.Discrete = self._sumo.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        global _playing
        super().reset(seed=seed)
        _end_simulation()
        # SUMO takes signed numbers of 32 bits, while Gymnasium's seeds may be longer.
        obs, _ = self._sumo.reset(seed=int(self.np_random.integers(2**31)))
        _playing = self._sumo
        return obs, {}

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        if _playing is not self._sumo:
            raise UserError(
                "SUMO has one simulation per process, and another environment plays in this one: give "
                "--envs-per-worker 1, in a mode whose workers are processes (freerun, pipes, executor, ray, sync)"
            )
        obs, reward, _, truncated, _ = self._sumo.step(int(action))
        return obs, float(reward), False, bool(truncated), {}

    def action_masks(self) -> NDArray[np.bool_]:
        """Allow every phase, or the present one alone while sumo-rl would ignore a change."""
        light = self._sumo.traffic_signals[self._sumo.ts_ids[0]]
        may_change = light.time_since_last_phase_change >= light.yellow_time + light.min_green
        masks = np.full(self.action_space.n, may_change)
        masks[light.green_phase] = True
        return masks

    def close(self) -> None:
        if _playing is self._sumo:
            _end_simulation()


def _end_simulation() -> None:
    """End the simulation of this process if there is one, so that another can begin."""
    global _playing
    if _playing is not None:
        _playing.close()
        _playing = None


def _import_sumo_rl() -> Any:
    """Import sumo-rl on libsumo. It reads both variables when it is imported, and the import greets on the terminal."""
    os.environ.setdefault("LIBSUMO_AS_TRACI", "1")
    with contextlib.redirect_stdout(io.StringIO()):
        import sumo  # which sets SUMO_HOME if it is not set
        import sumo_rl
    del sumo
    return sumo_rl
