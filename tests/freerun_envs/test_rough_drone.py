"""The built-in drone: its flight against closed forms, its ground, its tasks by hand, many against single ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import freerun.adapters.catalog  # noqa: F401
from freerun.core import UserError
from freerun.tools.check_env.checks import check
from freerun_envs import counter_random, terrain
from freerun_envs import drone_physics as physics
from freerun_envs.drone_physics import GRAVITY, HOVER_ACTION, INERTIA, MASS, Body, airframe
from freerun_envs.drone_sim import RoughDroneSim
from freerun_envs.drone_tasks import CEILING, STEP_SECONDS, TASKS
from freerun_envs.rough_drone import RoughDrone

DT = 0.01
VACUUM = airframe(drag=0.0, angular_drag=0.0)
STILL = torch.zeros(1, 3)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def body(velocity: Tensor = STILL, rates: Tensor = STILL) -> Body:
    return Body(torch.zeros_like(velocity), velocity, torch.tensor([[1.0, 0.0, 0.0, 0.0]]), rates)


def fly(start: Body, num_steps: int, thrust: float = 0.0, moment: Tensor = STILL) -> Body:
    state, force = start, torch.tensor([[thrust]])
    for _ in range(num_steps):
        state = physics.advance(state, force, moment, VACUUM, DT)
    return state


# ---------------------------------------------------------------------------------------------- physics


def test_hover_keeps_its_height() -> None:
    thrust, moment = physics.thrust_and_moment(torch.tensor([HOVER_ACTION]))
    assert float(thrust) == pytest.approx(MASS * GRAVITY, rel=1e-6)
    assert not moment.any()
    state = fly(body(), 500, float(thrust))
    assert state.position.abs().max() < 1e-4


def test_free_fall_is_that_of_the_scheme_and_nearly_that_of_galileo() -> None:
    n, t = 100, 1.0
    state = fly(body(), n)
    assert float(state.velocity[0, 2]) == pytest.approx(-GRAVITY * t, rel=1e-5)
    assert float(state.position[0, 2]) == pytest.approx(-GRAVITY * DT**2 * n * (n + 1) / 2, rel=1e-5)
    assert float(state.position[0, 2]) == pytest.approx(-GRAVITY * t**2 / 2, abs=GRAVITY * t * DT / 2 + 1e-4)


def test_energy_in_free_flight() -> None:
    """Semi-implicit Euler keeps E + ½ g dt v_z; E itself strays by no more than ½ g dt |v|."""

    def energy(state: Body) -> float:
        return float(0.5 * state.velocity.square().sum() + GRAVITY * state.position[0, 2])

    start = body(torch.tensor([[3.0, -1.0, 8.0]]))
    end = fly(start, 150)
    shadows = [energy(state) - 0.5 * GRAVITY * DT * float(state.velocity[0, 2]) for state in (start, end)]
    assert shadows[1] == pytest.approx(shadows[0], rel=1e-4)
    assert energy(end) == pytest.approx(energy(start), abs=0.5 * GRAVITY * DT * 20)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_constant_torque_spins_up(axis: int) -> None:
    n, t = 100, 1.0
    moment = torch.zeros(1, 3)
    moment[0, axis] = 1e-3
    acceleration = 1e-3 / INERTIA[axis]
    state = fly(body(), n, moment=moment)
    rates = torch.zeros(3)
    rates[axis] = acceleration * t
    torch.testing.assert_close(state.rates[0], rates, rtol=1e-4, atol=1e-5)
    angle = 2 * math.atan2(float(state.attitude[0, 1 + axis]), float(state.attitude[0, 0]))
    assert angle == pytest.approx(acceleration * DT**2 * n * (n + 1) / 2, rel=1e-4)
    assert angle == pytest.approx(acceleration * t**2 / 2, rel=2 * DT)


def test_torque_free_tumbling_keeps_momentum_and_energy() -> None:
    start = body(rates=torch.tensor([[3.0, -2.0, 5.0]]))
    state = fly(start, 1000)
    inertia = torch.tensor(INERTIA)

    def momentum(state: Body) -> Tensor:
        return physics.rotate(state.attitude, inertia * state.rates)

    def energy(state: Body) -> float:
        return float((inertia * state.rates.square()).sum() / 2)

    assert not torch.allclose(state.rates, start.rates, rtol=0.1)  # it does tumble
    torch.testing.assert_close(momentum(state), momentum(start), rtol=1e-3, atol=1e-6)
    assert energy(state) == pytest.approx(energy(start), rel=5e-3)
    assert float(state.rates[0, 2]) == pytest.approx(5.0, rel=5e-3)  # a symmetric top keeps its spin


def test_drag_slows_to_terminal_velocity() -> None:
    state = body()
    for _ in range(4000):
        state = physics.advance(state, torch.zeros(1, 1), STILL, airframe(), DT)
    assert float(state.velocity[0, 2]) == pytest.approx(-MASS * GRAVITY / physics.DRAG, rel=1e-2)


def test_quaternions_by_hand() -> None:
    quarter = physics.rotation_by(torch.tensor([[0.0, 0.0, math.pi / 2]]))
    x, y = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    torch.testing.assert_close(physics.rotate(quarter, x), y)
    torch.testing.assert_close(physics.rotate_back(quarter, y), x)
    torch.testing.assert_close(physics.heading(quarter), torch.tensor([math.pi / 2]))
    pitched = physics.multiply(quarter, physics.rotation_by(torch.tensor([[0.0, math.pi / 2, 0.0]])))
    torch.testing.assert_close(physics.rotate(pitched, x), torch.tensor([[0.0, 0.0, -1.0]]))  # nose down
    torch.testing.assert_close(physics.rotation_by(STILL), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


# ---------------------------------------------------------------------------------------------- terrain and chance


def test_a_seed_decides_the_ground() -> None:
    one, again, other = (terrain.make_terrain(seed, 2) for seed in (5, 5, 6))
    assert torch.equal(one.heights, again.heights)
    assert torch.equal(one.starts, again.starts)
    assert not torch.equal(one.heights, other.heights)
    assert not torch.equal(one.heights[0], one.heights[1])
    assert torch.equal(terrain.make_terrain(5, 1).heights[0], one.heights[0])
    assert float(one.heights.min()) == 0.0
    assert float(one.heights.max()) == pytest.approx(terrain.RELIEF_METRES)
    slope = (one.heights[:, 1:] - one.heights[:, :-1]).abs() / terrain.GRID_METRES
    assert 0.2 < float(slope.mean()) < 0.5  # rough, yet no cliffs
    assert float(slope.max()) < 3


def test_the_ground_is_bilinear() -> None:
    ground = terrain.make_terrain(1, 3)
    along = torch.arange(terrain.NUM_POINTS) * terrain.GRID_METRES - terrain.HALF_METRES
    x, y = torch.meshgrid(along, along, indexing="xy")
    for number in range(3):
        assert torch.equal(terrain.ground_height(ground, torch.tensor(number), x, y), ground.heights[number])
    corners = ground.heights[2, 10:12, 20:22].double()
    x, y = along[20] + 0.25 * 0.3, along[10] + 0.25 * 0.6
    by_hand = torch.tensor([0.4, 0.6], dtype=torch.double) @ corners @ torch.tensor([0.7, 0.3], dtype=torch.double)
    assert float(terrain.ground_height(ground, torch.tensor(2), x, y)) == pytest.approx(float(by_hand), abs=1e-4)
    far = terrain.ground_height(ground, torch.tensor(0), torch.tensor(99.0), torch.tensor(-99.0))
    assert far == ground.heights[0, 0, -1]


def test_starts_lie_on_low_ground_away_from_the_edge() -> None:
    ground = terrain.make_terrain(0, 16)
    numbers = torch.arange(16).repeat_interleave(terrain.NUM_STARTS)
    x, y, z = ground.starts.unbind(1)
    torch.testing.assert_close(terrain.ground_height(ground, numbers, x, y), z)
    assert float(z.max()) + 2.5 < CEILING
    assert float(ground.starts[:, :2].abs().max()) <= terrain.HALF_METRES - terrain.START_MARGIN_METRES


def test_random_numbers_are_those_of_splitmix() -> None:
    def python_mix(number: int) -> int:
        mask = 2**64 - 1
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
        number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
        return number ^ number >> 31

    words = [0, 1, 2**63 - 1, 0x123456789ABCDEF]
    mixed = counter_random.mix(torch.tensor(words)).tolist()
    assert [number % 2**64 for number in mixed] == [python_mix(word) for word in words]

    keys = counter_random.keys_from(3, 1000)
    drawn = counter_random.uniforms(keys, torch.ones_like(keys), torch.arange(12))
    assert 0.0 <= float(drawn.min()) < float(drawn.max()) < 1.0
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.01)
    correlation = torch.corrcoef(drawn.T) - torch.eye(12)
    assert float(correlation.abs().max()) < 0.15
    assert torch.equal(counter_random.keys_from([3], 1), counter_random.keys_from(3, 2)[:1])
    with pytest.raises(ValueError, match="2 seeds for 3"):
        counter_random.keys_from([1, 2], 3)


# ---------------------------------------------------------------------------------------------- tasks by hand


def at_rest(sim: RoughDroneSim, position: Tensor) -> None:
    sim.body.position.copy_(position)
    sim.body.velocity.zero_()
    sim.body.rates.zero_()
    sim.body.attitude.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))


def hover_action(num_envs: int) -> Tensor:
    return torch.tensor([HOVER_ACTION]).repeat(num_envs, 1)


def clearance(sim: RoughDroneSim) -> Tensor:
    x, y, z = sim.body.position.unbind(1)
    return z - terrain.ground_height(sim.terrain, sim.field, x, y)


def test_hovering_at_the_goal_earns_the_most() -> None:
    sim = RoughDroneSim(4, task="hover", seed=1)
    torch.testing.assert_close(sim.goal - sim.body.position, torch.tensor([[0.0, 0.0, 1.0]]).repeat(4, 1))
    at_rest(sim, sim.goal)
    total = torch.zeros(4)
    for _ in range(500):
        result = sim.step(hover_action(4))
        total += result.reward
    assert result.truncated.all()
    assert not result.terminated.any()
    torch.testing.assert_close(total, torch.full((4,), 15.0 * 10.0), rtol=1e-3, atol=0.0)


def test_the_hover_reward_by_hand() -> None:
    sim = RoughDroneSim(1, task="hover")
    at_rest(sim, sim.goal - torch.tensor([0.3, 0.0, 0.4]))
    sim.body.velocity[0, 1] = 2.0
    sim.body.rates[0, 2] = 3.0
    reward = float(sim.step(hover_action(1)).reward)
    by_hand = STEP_SECONDS * (-0.05 * 4 - 0.01 * 9 + 15 * (1 - math.tanh(0.5 / 0.8)))
    assert reward == pytest.approx(by_hand, rel=0.02)  # a step later, drag has taken a little


@pytest.mark.parametrize("task", list(TASKS[0]))
def test_crashes_terminate_and_time_truncates(task: str) -> None:
    sim = RoughDroneSim(5, task=task, seed=2, episode_seconds=0.04)
    places = sim.body.position.clone()
    places[1, 2] -= clearance(sim)[1] - 0.05  # into the ground
    places[2, 2] = CEILING + 0.01
    places[3, 0] = terrain.HALF_METRES + 0.01
    places[3, 2] = CEILING - 0.01
    at_rest(sim, places)
    sim.steps[4] = 1
    result = sim.step(hover_action(5))
    assert result.terminated.tolist() == [False, True, True, True, False]
    assert result.truncated.tolist() == [False, False, False, False, True]
    assert sim.steps.tolist() == [1, 0, 0, 0, 0]
    changed = (result.obs != result.final_obs).any(1)
    assert changed.tolist() == [False, True, True, True, True]
    assert not sim.step(hover_action(5)).terminated.any()


def test_observations_by_hand() -> None:
    sim = RoughDroneSim(1, task="waypoint")
    at_rest(sim, torch.tensor([[1.0, 2.0, 5.0]]))
    sim.goal.copy_(torch.tensor([[4.0, 2.0, 5.0]]))
    sim.body.attitude.copy_(physics.rotation_by(torch.tensor([[0.0, 0.0, math.pi / 2]])))  # looks along y
    sim.body.velocity.copy_(torch.tensor([[0.0, 1.5, 0.0]]))
    obs = sim.observe()[0]
    by_hand = [1.5, 0, 0, 0, 0, 0, 0, 0, -1, 0, -3, 0, CEILING - 5.0]
    torch.testing.assert_close(obs[:13], torch.tensor(by_hand), rtol=0.0, atol=1e-5)

    def ground(x: float, y: float) -> float:
        return float(terrain.ground_height(sim.terrain, sim.field[0], torch.tensor(x), torch.tensor(y)))

    scan = obs[13:].reshape(5, 5)  # [from right to left, from behind to ahead]
    assert float(scan[2, 2]) == pytest.approx(5.0 - ground(1.0, 2.0), abs=1e-4)
    assert float(scan[2, 4]) == pytest.approx(5.0 - ground(1.0, 4.0), abs=1e-4)
    assert float(scan[0, 2]) == pytest.approx(5.0 - ground(3.0, 2.0), abs=1e-4)

    sim = RoughDroneSim(1, task="explore")
    at_rest(sim, torch.tensor([[20.0, -10.0, 5.0]]))  # far from the start, where some cells are seen already
    obs = sim.observe()[0]
    torch.testing.assert_close(obs[9:12], torch.tensor([-1.0, 0.5, -0.25]))
    unseen = obs[38:].reshape(7, 7)
    assert unseen[:, 3:].tolist() == [[1.0] * 4] * 7  # beyond the edge ahead
    assert unseen[:, :3].tolist() == [[0.0] * 3] * 7


def test_version_1_lets_drones_fly_fast() -> None:
    first, second = (RoughDroneSim(1, task="explore", version=version) for version in (0, 1))
    for sim in (first, second):
        at_rest(sim, torch.tensor([[12.5, 0.5, 5.5]]))
    assert torch.equal(second.observe(), first.observe())
    for sim, cost in ((first, 0.05), (second, 0.0)):
        sim.step(hover_action(1))  # sees what is around
        sim.body.velocity[0, 2] = -1.0
        assert float(sim.step(hover_action(1)).reward) == pytest.approx(-STEP_SECONDS * cost, abs=1e-4)
    for task in ("hover", "waypoint"):
        assert TASKS[0][task] == TASKS[1][task]


def test_exploring_pays_for_cells_seen_for_the_first_time() -> None:
    sim = RoughDroneSim(1, task="explore")
    seen_at_start = int(sim.seen_cells(0).sum())
    at_rest(sim, torch.tensor([[0.5, 0.5, 5.5]]))  # far from the start
    in_sight = sum(x * x + y * y <= 2.5**2 for x in range(-3, 4) for y in range(-3, 4))
    assert float(sim.step(hover_action(1)).reward) == pytest.approx(0.1 * in_sight, abs=1e-4)
    assert int(sim.seen_cells(0).sum()) == seen_at_start + in_sight
    assert sim.seen_cells(0)[20, 18:23].all()
    assert not sim.seen_cells(0)[20, 17]
    assert float(sim.step(hover_action(1)).reward) == pytest.approx(0.0, abs=1e-4)
    at_rest(sim, torch.tensor([[1.5, 0.5, 5.5]]))
    assert float(sim.step(hover_action(1)).reward) == pytest.approx(0.1 * 5, abs=1e-4)
    sim.body.position[0, 2] = CEILING + 1.0
    assert float(sim.step(hover_action(1)).reward) == pytest.approx(-1.0, abs=1e-3)
    assert 8 <= int(sim.seen_cells(0).sum()) <= in_sight + 2  # of the next episode's start alone


def test_a_waypoint_that_is_reached_gives_way_to_another() -> None:
    sim = RoughDroneSim(2, task="waypoint", seed=4)
    goal = sim.goal.clone()
    at_rest(sim, torch.stack([goal[0] - torch.tensor([0.0, 0.0, 0.2]), goal[1] + torch.tensor([0.0, 0.0, 0.8])]))
    sim.body.velocity[1, 2] = -1.0
    reward = sim.step(hover_action(2)).reward
    assert float(reward[0]) == pytest.approx(5.0, abs=0.01)
    assert float(reward[1]) == pytest.approx(0.02 - 0.02 * 0.05, abs=1e-3)  # two centimetres nearer
    assert not torch.equal(sim.goal[0], goal[0])
    assert torch.equal(sim.goal[1], goal[1])


def controller(obs: Tensor) -> Tensor:
    """Proportional-derivative: a wished acceleration, and the moments that turn the thrust towards it."""
    velocity, rates, down, to_goal = obs[:, 0:3], obs[:, 3:6], obs[:, 6:9], obs[:, 9:12]
    wished = (4.0 * to_goal - 4.0 * velocity).clamp(-4.0, 4.0) - GRAVITY * down
    thrust = wished[:, 2:] * (2 / (physics.THRUST_TO_WEIGHT * GRAVITY)) - 1.0
    aim = torch.nn.functional.normalize(wished, dim=1)
    turn = torch.stack([-aim[:, 1], aim[:, 0], torch.zeros(len(aim))], 1)
    moment = torch.tensor(INERTIA) * (80.0 * turn - 14.0 * rates) / physics.MAX_MOMENT
    return torch.cat([thrust, moment], 1).clamp(-1.0, 1.0)


def test_a_plain_controller_holds_the_goal() -> None:
    sim = RoughDroneSim(32, task="hover", seed=5)
    obs = sim.reset()
    for step in range(499):
        obs, _, _, terminated, _ = sim.step(controller(obs))
        assert not terminated.any()
        if step > 250:
            assert float((sim.goal - sim.body.position).norm(dim=1).max()) < 0.05
    assert float(sim.body.velocity.norm(dim=1).max()) < 0.05


# ---------------------------------------------------------------------------------------------- batches and seeds


@pytest.mark.parametrize("task", list(TASKS[0]))
def test_many_are_as_many_single_ones(task: str) -> None:
    seeds = [11, 2**40 + 5, 3, 8]
    many = RoughDroneSim(4, task=task, episode_seconds=1.0)
    singles = [RoughDroneSim(1, task=task, episode_seconds=1.0) for _ in seeds]
    torch.testing.assert_close(
        many.reset(seeds), torch.cat([sim.reset([s]) for sim, s in zip(singles, seeds, strict=True)])
    )
    generator = torch.Generator().manual_seed(0)
    num_ended = 0
    for _ in range(120):
        action = torch.rand(4, 4, generator=generator) * 2 - 1
        result = many.step(action)
        rows = [sim.step(action[k : k + 1]) for k, sim in enumerate(singles)]
        for name, values in result._asdict().items():
            torch.testing.assert_close(values, torch.cat([getattr(row, name) for row in rows]), rtol=1e-3, atol=1e-4)
        num_ended += int((result.terminated | result.truncated).sum())
    assert num_ended >= 8


@pytest.mark.parametrize("task", list(TASKS[0]))
def test_random_flight_stays_finite_and_final_observations_are_honest(task: str) -> None:
    sim = RoughDroneSim(64, task=task, seed=9)
    generator = torch.Generator().manual_seed(1)
    limit = float(sim.spec.observation_space.high[0])
    num_crashed = 0
    for _ in range(700):
        obs, final_obs, reward, terminated, truncated = sim.step(torch.rand(64, 4, generator=generator) * 2 - 1)
        ended = terminated | truncated
        assert torch.equal((obs != final_obs).any(1), ended)
        assert float(final_obs.abs().max()) < limit  # so no NaN, either
        assert reward.isfinite().all()
        num_crashed += int(terminated.sum())
    assert num_crashed > 64
    torch.testing.assert_close(sim.body.attitude.norm(dim=1), torch.ones(64))


def test_seeds_reproduce_and_episodes_differ() -> None:
    sim = RoughDroneSim(8, seed=7)
    first = sim.reset(7).clone()
    second = sim.reset().clone()
    assert torch.equal(sim.reset(7), first)
    assert torch.equal(sim.reset(), second)
    assert not (first == second).all(1).any()
    assert len(torch.unique(first, dim=0)) == 8


@pytest.mark.parametrize("task", list(TASKS[0]))
def test_the_first_observation_is_that_of_the_start(task: str) -> None:
    sim = RoughDroneSim(1, task=task, seed=3)
    torch.testing.assert_close(sim.reset(), sim.observe())


class Watch(TorchDispatchMode):
    """Notes the operations that would make the host wait for the device, or whose shapes depend on the data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        masks = [one for one in args[1] if one.dtype == torch.bool] if name in ("index", "index_put_") else []
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "lift_fresh"):
            self.found.append(name)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("task", list(TASKS[0]))
def test_a_step_can_be_captured(task: str) -> None:
    """No wait for the device, no shape that depends on data, no constant copied to the device, state in place."""
    sim = RoughDroneSim(4, task=task)
    tensors = {name: value.data_ptr() for name, value in vars(sim).items() if isinstance(value, Tensor)}
    with Watch() as watch:
        float(torch.zeros(1)[torch.tensor([True])])
    assert watch.found == ["lift_fresh", "index", "_local_scalar_dense"]  # it would be seen
    with Watch() as watch:
        sim.step(hover_action(4))
    assert watch.found == ["lift_fresh"]  # the action of this test
    assert {name: value.data_ptr() for name, value in vars(sim).items() if isinstance(value, Tensor)} == tensors


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("task", list(TASKS[0]))
def test_a_captured_gpu_flies_as_the_cpu_does(task: str) -> None:
    here, there = RoughDroneSim(256, "cpu", task, seed=3), RoughDroneSim(256, "cuda", task, seed=3)
    there.step(hover_action(256).cuda())
    action, graph = torch.zeros(256, 4, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = there.step(action)
    torch.testing.assert_close(there.reset(3).cpu(), here.reset(3))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        action.copy_(torch.rand(256, 4, generator=generator) * 2 - 1)
        graph.replay()
        for name, values in here.step(action.cpu())._asdict().items():
            torch.testing.assert_close(getattr(captured, name).cpu(), values, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------------------------------- the Gymnasium view


@pytest.mark.parametrize("task", list(TASKS[0]))
def test_no_fault_is_found(task: str) -> None:
    check_env(gymnasium.make("freerun/RoughDrone-v0", task=task).unwrapped, skip_render_check=True)
    findings = check("freerun/RoughDrone-v0", {"task": task, "episode_seconds": 1.0})
    assert {finding.level for finding in findings} == {"ok"}, findings


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="explore, hover, waypoint"):
        RoughDrone(task="land")
    with pytest.raises(UserError, match="no version 2: use 0 or 1"):
        RoughDrone(version=2)
    with pytest.raises(UserError, match=r"episodes of 0\.02 s"):
        RoughDrone(episode_seconds=0.0)
    with pytest.raises(UserError, match="no device 'gpu'"):
        RoughDrone(device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="needs a GPU"):
            RoughDrone(device="cuda:0")
