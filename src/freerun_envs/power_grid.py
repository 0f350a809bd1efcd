"""`grid2op/PowerGrid-v0`: the operator of a power grid in grid2op, by default the 14 substations of IEEE's case 14.

Source: https://github.com/Grid2op/grid2op, the simulator of the competitions "Learning to run a power network".
"""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from freerun.core import FloatArray, RequiredPackage, UserError

GRID2OP = RequiredPackage("grid2op", "grid2op", "grid2op")
LIGHTSIM = RequiredPackage("lightsim2grid", "grid2op with lightsim2grid", "grid2op", also=("grid2op",))
BACKENDS = {"lightsim2grid": LIGHTSIM, "pandapower": GRID2OP}
REST_STEPS = 10.0
"""A line that was overloaded for too long stays off for 10 steps. Only maintenance, in larger grids, takes longer."""
LOAD_SCALE_MW = 100.0
UNSOLVABLE = "failed to factorize matrix"
"""What scipy says, by way of pandapower, about a grid that fell apart. grid2op takes every other failure of the solver
for a lost grid, but does not know this one, so the environment itself does so."""


class PowerGrid(gymnasium.Env[FloatArray, np.int64]):
    """Every five minutes an action changes nothing, the buses of one substation, or whether one line is connected.

    An observation has the load of each line (1 is its limit), power that is produced and consumed, the bus of each
    element, and the steps that lines have been overloaded for, and must rest. The reward is grid2op's own. The mask
    forbids what the rules call illegal: lines and substations must rest after a change. Losing the grid terminates an
    episode, but the end of its time series only truncates it.
    """

    def __init__(
        self,
        grid: str = "l2rpn_case14_sandbox",
        backend: str = "lightsim2grid",
        cooldown_steps: int = 3,
        downloaded: bool = False,
        cache_series: bool | None = None,
    ):
        """`downloaded` plays the whole data set of the grid, which grid2op fetches once, instead of the few time series
        in its package. `cache_series` keeps series in memory, which makes resets quick; by default it does so unless
        they are downloaded, for those are too many. The competitions have a `cooldown_steps` of 3."""
        if backend not in BACKENDS:
            raise UserError(f"there is no backend {backend!r}: choose {' or '.join(BACKENDS)}")
        BACKENDS[backend].require("grid2op/PowerGrid-v0")
        self._grid: Any = _make(grid, backend, downloaded, not downloaded if cache_series is None else cache_series)
        parameters = self._grid.parameters
        parameters.NB_TIMESTEP_COOLDOWN_SUB = parameters.NB_TIMESTEP_COOLDOWN_LINE = cooldown_steps
        self._grid.change_parameters(parameters)  # from the next reset on
        self._num_series = len(self._grid.chronics_handler.subpaths)
        self._list_actions()
        num_lines, num_substations = self._grid.n_line, self._grid.n_sub
        # The last three parts have known ranges, so that nobody normalises them.
        num_measured = num_lines + self._grid.n_gen + self._grid.n_load
        num_known = self._grid.dim_topo + 2 * num_lines + num_substations
        high = np.concatenate([np.full(num_measured, np.inf), np.ones(num_known)]).astype(np.float32)
        self.observation_space = spaces.Box(-high, high)
        self.action_space = spaces.Discrete(len(self._actions))

    def _list_actions(self) -> None:
        """List the actions, and for each of them what the rules look at: its substation, and lines that it connects."""
        make_action, grid = self._grid.action_space, self._grid
        by_substation = [make_action.get_all_unitary_topologies_set(make_action, sub) for sub in range(grid.n_sub)]
        self._actions = [make_action(), *(action for some in by_substation for action in some)]
        num_topologies = len(self._actions)
        self._actions += [make_action({"change_line_status": [line]}) for line in range(grid.n_line)]
        self._uses_substation = np.zeros((len(self._actions), grid.n_sub), np.bool_)
        substations = np.repeat(range(grid.n_sub), [len(some) for some in by_substation])
        self._uses_substation[np.arange(1, num_topologies), substations] = True
        # A bus that is set for an end of a line that is off connects the line, which then counts as changed.
        self._sets_line_end = np.zeros((len(self._actions), grid.n_line), np.bool_)
        for number, action in enumerate(self._actions[:num_topologies]):
            buses = action.set_bus
            self._sets_line_end[number] = (buses[grid.line_or_pos_topo_vect] > 0) | (
                buses[grid.line_ex_pos_topo_vect] > 0
            )
        self._switches_line = np.zeros((len(self._actions), grid.n_line), np.bool_)
        self._switches_line[np.arange(num_topologies, len(self._actions)), np.arange(grid.n_line)] = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        # Otherwise grid2op would play its series one after another, whatever the seed.
        series = int(self.np_random.integers(self._num_series))
        grid_seed = int(self.np_random.integers(2**31 - 1))
        self._seen = self._grid.reset(seed=grid_seed, options={"time serie id": series})
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        try:
            self._seen, reward, is_over, info = self._grid.step(self._actions[action])
        except RuntimeError as error:
            if UNSOLVABLE not in str(error):
                raise
            return self._observe(), float(self._grid.reward_range[0]), True, False, {"is_illegal": False}
        is_last = self._grid.nb_time_step >= self._grid.max_episode_duration()
        return (
            self._observe(),
            float(reward),
            bool(is_over and not is_last),
            bool(is_over and is_last),
            {"is_illegal": info["is_illegal"]},
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """Allow the actions that grid2op's rules call legal now."""
        seen = self._seen
        line_rests, substation_rests = seen.time_before_cooldown_line > 0, seen.time_before_cooldown_sub > 0
        connected = self._sets_line_end & ~seen.line_status
        changed = connected | self._switches_line
        masks: NDArray[np.bool_] = ~(
            (changed & line_rests).any(1)
            | (self._uses_substation & substation_rests).any(1)
            | (changed.sum(1) > self._grid.parameters.MAX_LINE_STATUS_CHANGED)
        )
        return masks

    def _observe(self) -> FloatArray:
        seen = self._seen
        parts = (
            seen.rho,
            seen.gen_p / self._grid.gen_pmax,
            seen.load_p / LOAD_SCALE_MW,
            # -1: off, 0: the first bus, 1: the second.
            np.where(seen.topo_vect < 0, -1, seen.topo_vect - 1),
            np.minimum(seen.timestep_overflow / REST_STEPS, 1),
            np.minimum(seen.time_before_cooldown_line / REST_STEPS, 1),
            np.minimum(seen.time_before_cooldown_sub / REST_STEPS, 1),
        )
        return np.concatenate(parts).astype(np.float32)

    def close(self) -> None:
        self._grid.close()


def _make(grid: str, backend: str, downloaded: bool, cache_series: bool) -> Any:
    with warnings.catch_warnings():
        # About numba, which would help pandapower alone, and about the data in the package (docs/simulators.md).
        warnings.filterwarnings("ignore", "Numba cannot be loaded|You are using a development environment")
        import grid2op
        from grid2op.Chronics import MultifolderWithCache

        settings: dict[str, Any] = {"chronics_class": MultifolderWithCache} if cache_series else {}
        if backend == "lightsim2grid":
            from lightsim2grid import LightSimBackend

            settings["backend"] = LightSimBackend()
        try:
            made = grid2op.make(grid, test=not downloaded, **settings)
        except grid2op.Exceptions.Grid2OpException as error:
            raise UserError(f"grid2op cannot make the grid {grid!r}: {error}") from None
    if cache_series:
        made.chronics_handler.set_filter(lambda _: True)  # its own one keeps a single series
        made.chronics_handler.reset()  # which reads them
    return made
