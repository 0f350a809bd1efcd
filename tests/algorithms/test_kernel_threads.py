"""The compiled kernel's threads: any number of them gives the same bits, and forks and other callers are no trouble."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from freerun.algorithms.learners.compiled_kernel import Kernel, compiled_kernel
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import ActorCritic, flatten_parameters
from freerun.algorithms.policies.numpy_mlp import layers_of
from freerun.algorithms.ppo.compiled_steps import CompiledMLP, calls
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import EnvSpec, FloatArray, ObsGroups, Segment, mask_space

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
OBS = spaces.Box(-np.inf, np.inf, (5,), np.float32)
BOX = EnvSpec(OBS, spaces.Box(-1, 1, (3,), np.float32))
ENVS = {
    "box": BOX,
    "discrete": EnvSpec(OBS, spaces.Discrete(4)),
    "many-choices": EnvSpec(OBS, spaces.Discrete(145)),
    "multi-discrete": EnvSpec(OBS, spaces.MultiDiscrete([3, 2, 4])),
    "masked": EnvSpec.of_groups(ObsGroups(OBS, None, mask_space(spaces.Discrete(4))), spaces.Discrete(4), True),
    "group-for-the-critic": EnvSpec.of_groups(ObsGroups(OBS, OBS), BOX.action_space, True),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu": {"activation": "relu", "hidden_sizes": (70, 33)},
    "elu": {"activation": "elu", "hidden_sizes": (17,)},
    "entropy": {"entropy_coef": 0.05},
    "clipped-values": {"value_clip": 0.05},
    "kl-stop": {"target_kl": 0.02},
    "adaptive-rate": {"desired_kl": 0.005},
    "raw-advantage": {"normalize_advantage": False},
    "small-minibatches": {"minibatch_size": 7},
}
NUM_STEPS = 700
"""In minibatches of 350 rows, which are three parts of each network."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    kernel().set_threads(1)


def kernel() -> Kernel:
    found = compiled_kernel()
    assert found is not None
    return found


def segment(ppo: PPO, env: EnvSpec, num_steps: int = NUM_STEPS) -> Segment:
    """Made-up steps of the policy with the first weights, as if they were one update old."""
    rng = np.random.default_rng(1)
    obs = rng.standard_normal((num_steps, 1, *env.observation_space.shape), np.float32)
    if ppo.net.spec.has_mask:
        obs[..., -4:] = rng.integers(0, 2, (num_steps, 1, 4))
        obs[..., -1] = 1  # something must be allowed
    decision = ppo.policy.act(obs[:, 0], ppo.policy.draw(rng, num_steps))
    log_prob = ppo.policy.log_prob(decision.head, decision.action)
    number, no = np.zeros((num_steps, 1), np.int64), np.zeros((num_steps, 1), np.bool_)
    reward = rng.standard_normal((num_steps, 1), np.float32)
    action, next_obs = decision.action[:, None], np.roll(obs, -1, axis=0)
    return Segment(obs, action, log_prob[:, None], reward, no, no, next_obs, number, number, 0.1)


def learn(env: EnvSpec, num_steps: int = NUM_STEPS, **settings: Any) -> tuple[FloatArray, dict[str, float]]:
    """The weights after two updates, and what the last one measured."""
    ppo = make_ppo(env, **settings)
    return update_twice(ppo, segment(ppo, env, num_steps))


def make_ppo(env: EnvSpec, **settings: Any) -> PPO:
    return PPO(env, PPOConfig(**{"minibatch_size": 350, "num_epochs": 3, **settings}), 0, "cpu", False)


def update_twice(ppo: PPO, steps: Segment) -> tuple[FloatArray, dict[str, float]]:
    for version in (1, 2):
        ppo.observe([steps])
        metrics = dict(ppo.update(version, 0.0))
    return ppo.policy.weights.copy(), metrics


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS.keys())
def test_any_number_of_threads_gives_the_same_bits(env: EnvSpec, settings: dict[str, Any]) -> None:
    alone = learn(env, **settings)
    for num_threads in (2, 3, 4, 8):
        kernel().set_threads(num_threads)
        weights, metrics = learn(env, **settings)
        np.testing.assert_array_equal(weights, alone[0])
        assert metrics == alone[1]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 191, 192, 320, 449, 1000])
def test_any_number_of_rows_gives_the_same_bits(num_steps: int) -> None:
    """In one to four parts, whose sizes differ."""
    alone = learn(BOX, num_steps, minibatch_size=1000)
    kernel().set_threads(4)
    np.testing.assert_array_equal(learn(BOX, num_steps, minibatch_size=1000)[0], alone[0])


@pytest.mark.parametrize("row", [0, 100, 350, 699])
def test_what_is_not_finite_is_found_in_every_part(row: int) -> None:
    kernel().set_threads(4)
    settings: dict[str, Any] = dict.fromkeys(("normalize_advantage", "normalize_obs", "normalize_reward"), False)
    ppo = PPO(BOX, PPOConfig(minibatch_size=700, num_epochs=3, **settings), 0, "cpu", False)
    before = ppo.policy.weights.copy()
    steps = segment(ppo, BOX)
    steps.obs[row, 0, 2] = np.nan
    ppo.observe([steps])
    assert ppo.update(1, 0.0)["bad_gradients"] == 3
    np.testing.assert_array_equal(ppo.policy.weights, before)


@pytest.mark.parametrize("row", [0, 699])
def test_an_action_outside_its_space_is_an_error_in_every_part(row: int) -> None:
    kernel().set_threads(4)
    ppo = PPO(ENVS["discrete"], PPOConfig(minibatch_size=700, num_epochs=1), 0, "cpu", False)
    steps = segment(ppo, ENVS["discrete"])
    steps.action[row] = 4
    ppo.observe([replace(steps, version=steps.version + 1)])  # without lag, or torch would find it first
    with pytest.raises(IndexError, match="none of the choices"):
        ppo.update(1, 0.0)


def test_an_update_of_several_calls_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Python looks at each gradient step, at some, or at none before the end."""
    at_once, metrics = learn(BOX, minibatch_size=100)
    one_by_one = learn(BOX, minibatch_size=100, target_kl=1e6)
    np.testing.assert_array_equal(one_by_one[0], at_once)
    assert one_by_one[1] == metrics
    for rows_per_call in (1, 250, 699, 700):
        monkeypatch.setattr("freerun.algorithms.ppo.compiled_steps.ROWS_PER_CALL", rows_per_call)
        np.testing.assert_array_equal(learn(BOX, minibatch_size=100)[0], at_once)


def test_minibatches_are_dealt_into_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freerun.algorithms.ppo.compiled_steps.ROWS_PER_CALL", 10)
    sizes = [4, 6, 1, 30, 5, 5]
    assert [sizes[call] for call in calls(sizes)] == [[4, 6], [1], [30], [5, 5]]
    assert list(calls([])) == []


def test_gradients_of_parts_add_up_to_those_of_torch() -> None:
    fast, torch_one = (learn(BOX, 1000, minibatch_size=500, learner=learner)[0] for learner in ("fast", "torch"))
    np.testing.assert_allclose(fast, torch_one, atol=2e-5)


# ---------------------------------------------------------------------------------------------- the process around them


def num_threads_of_the_system() -> int:
    return len(os.listdir("/proc/self/task"))


NEEDS_PROC = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="nothing counts threads here")


@NEEDS_PROC
def test_helpers_start_when_they_are_needed_and_end_when_they_are_not() -> None:
    kernel().set_threads(1)
    learn(BOX)  # whatever else has threads has started them now
    before = num_threads_of_the_system()
    kernel().set_threads(3)
    assert num_threads_of_the_system() == before
    learn(BOX)
    assert num_threads_of_the_system() == before + 2
    kernel().set_threads(2)
    assert num_threads_of_the_system() == before + 1
    kernel().set_threads(1)
    assert num_threads_of_the_system() == before


def test_the_number_of_threads_has_limits() -> None:
    for wanted, given in ((0, 1), (-3, 1), (1000, kernel().most_threads)):
        kernel().set_threads(wanted)
        assert kernel().num_threads() == given


def test_threads_that_compute_at_the_same_time_get_the_same_bits() -> None:
    alone = learn(BOX)[0]
    kernel().set_threads(4)
    found: list[FloatArray] = []
    learners = [make_ppo(BOX) for _ in range(3)]  # here: torch has one random generator for first weights
    steps = segment(learners[0], BOX)

    def update(ppo: PPO) -> None:
        found.append(update_twice(ppo, steps)[0])

    callers = [threading.Thread(target=update, args=(ppo,)) for ppo in learners]
    for caller in callers:
        caller.start()
    for number in (1, 3, 2, 4):  # and somebody changes the number meanwhile
        kernel().set_threads(number)
        time.sleep(0.005)
    for caller in callers:
        caller.join()
    assert len(found) == 3
    for weights in found:
        np.testing.assert_array_equal(weights, alone)


def in_a_fork(compute: Callable[[], bool]) -> int:
    """Whether a forked child finds it true: 0 if so. One that hangs ends by a signal."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if compute() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # this is a process with threads
def test_a_forked_child_has_no_helpers_and_computes_the_same() -> None:
    alone = learn(BOX)[0]
    kernel().set_threads(3)
    learn(BOX)

    def child() -> bool:
        is_alone = kernel().num_threads() == 1
        same = np.array_equal(learn(BOX)[0], alone)
        kernel().set_threads(2)
        return is_alone and same and np.array_equal(learn(BOX)[0], alone)

    assert in_a_fork(child) == 0
    assert kernel().num_threads() == 3  # the parent keeps its own
    np.testing.assert_array_equal(learn(BOX)[0], alone)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_computes_does_no_harm() -> None:
    """The child finds locks that nobody will open, and is not held up by them.

    Nothing but the kernel computes here, because OpenBLAS hangs where its process forks at the same time."""
    busy, mine = network(), network()
    x = torch.ones(2000, 5)
    expected = mine(x)
    kernel().set_threads(4)
    ends, results = threading.Event(), []

    def go_on() -> None:
        while not ends.is_set():
            assert torch.equal(busy(x), expected)

    learner = threading.Thread(target=go_on)
    learner.start()
    try:
        results = [in_a_fork(lambda: outputs_are(mine, x, expected)) for _ in range(10)]
    finally:
        ends.set()
        learner.join()
    assert results == [0] * 10


def network() -> CompiledMLP:
    net = ActorCritic(ActorSpec(5, (64, 64), "tanh", (4,), 0, False))
    flatten_parameters(net)
    with torch.no_grad():
        for weight in net.parameters():
            weight.fill_(0.1)
    return CompiledMLP(kernel(), layers_of(net.critic), "tanh")


def outputs_are(net: CompiledMLP, x: torch.Tensor, expected: torch.Tensor) -> bool:
    for num_threads in (1, 2):
        kernel().set_threads(num_threads)
        if not torch.equal(net(x), expected):
            return False
    return True


PROGRAM = """
import resource, torch
from freerun.algorithms.learners.compiled_kernel import compiled_kernel
from freerun.algorithms.policies.mlp_actor import ActorSpec
from freerun.algorithms.policies.networks import ActorCritic, flatten_parameters
from freerun.algorithms.policies.numpy_mlp import layers_of
from freerun.algorithms.ppo.compiled_steps import CompiledMLP
torch.set_num_threads(1)
net, kernel, x = ActorCritic(ActorSpec(3, (64, 64), "tanh", (4,), 0, False)), compiled_kernel(), torch.rand(1000, 3)
flatten_parameters(net)
compute = CompiledMLP(kernel, layers_of(net.critic), "tanh")
alone = compute(x)
"""


def run_program(end: str) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM + end], check=True, timeout=60)


def test_a_program_ends_although_its_helpers_wait() -> None:
    run_program("kernel.set_threads(4)\nassert torch.equal(compute(x), alone)")


@NEEDS_PROC
def test_where_no_thread_can_be_had_the_calling_one_computes_alone() -> None:
    """The stack of another thread needs more memory than this process may take."""
    run_program(
        "kernel.set_threads(4)\n"
        "compute.make_room_for_threads()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))\n"
        "assert torch.equal(compute(x), alone)\n"
        "assert kernel.num_threads() == 1\n"
    )
