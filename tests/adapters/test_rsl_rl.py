"""RSL-RL's environments under freerun, and freerun's under RSL-RL's own runner (the real rsl-rl-lib)."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from toy_tensors import Counting

import freerun
from freerun.adapters.rsl_rl_env import RslRlEnv, make
from freerun.core import EnvSpec, UserError
from freerun.settings.presets import settings_of
from freerun_envs.drone_sim import RoughDroneSim

pytest.importorskip("rsl_rl")
from rsl_rl.algorithms import PPO
from rsl_rl.env import VecEnv
from rsl_rl.models import MLPModel
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

from freerun.adapters.rsl_rl_vec_env import RslRlVecEnv

NUM_ENVS = 4


def counting() -> Counting:
    """freerun's: it counts as the one below does."""
    return Counting(NUM_ENVS, "cpu", None, True)


class CountingVecEnv(VecEnv):
    """Row i ends its episodes after 2 + i steps, odd rows by time. As many do, it writes extras only when one ends."""

    def __init__(self, num_envs: int = NUM_ENVS, device: str = "cpu", seed: int = 0, length: int = 2) -> None:
        self.num_envs, self.num_actions, self.device = num_envs, 2, device
        self.cfg: dict[str, Any] = {}
        self.max_episode_length = 100
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64)
        self.rows = torch.arange(num_envs)
        self.length = length
        self.extras: dict[str, Any] = {}
        self.last_action: Tensor | None = None
        self.is_closed = False

    def get_observations(self) -> TensorDict:
        groups = {
            "policy": torch.stack([self.rows, self.episode_length_buf], 1).float(),
            "critic": torch.ones(self.num_envs, 3),
        }
        return TensorDict(groups, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        self.last_action = actions
        self.episode_length_buf += 1
        reward = self.episode_length_buf.float()
        ended = self.episode_length_buf >= self.length + self.rows
        if ended.any():
            self.extras["time_outs"] = ended & (self.rows % 2 == 1)
            self.extras.setdefault("log", {})["/ended"] = float(ended.sum())
        self.episode_length_buf.masked_fill_(ended, 0)
        return self.get_observations(), reward, ended.long(), self.extras

    def close(self) -> None:
        self.is_closed = True


# ---------------------------------------------------------------------------------------------- theirs under freerun


def test_a_vec_env_is_stepped_as_it_says() -> None:
    env = RslRlEnv(CountingVecEnv())
    assert env.reset().tolist() == [[row, 0, 1, 1, 1] for row in range(NUM_ENVS)]  # what the critic sees comes last
    counts = [0] * NUM_ENVS
    for _ in range(12):
        step = env.step(torch.zeros(NUM_ENVS, 2))
        for row in range(NUM_ENVS):
            counts[row] += 1
            assert step.reward[row] == counts[row]
            ended = counts[row] == 2 + row
            assert bool(step.terminated[row]) == (ended and row % 2 == 0)
            assert bool(step.truncated[row]) == (ended and row % 2 == 1)
            counts[row] = 0 if ended else counts[row]
            assert step.obs[row].tolist() == [row, counts[row], 1, 1, 1]


def test_it_says_that_final_observations_are_hidden() -> None:
    assert not RslRlEnv(CountingVecEnv()).spec.reports_final_obs


def test_the_next_step_leaves_the_tensors_of_the_last_alone() -> None:
    env = RslRlEnv(CountingVecEnv())
    for _ in range(6):
        step = env.step(torch.zeros(NUM_ENVS, 2))
        before = [part.clone() for part in step]
        env.step(torch.zeros(NUM_ENVS, 2))
        assert all(torch.equal(part, kept) for part, kept in zip(step, before, strict=True))


def test_its_log_is_never_read_twice() -> None:
    env = RslRlEnv(CountingVecEnv())
    for _ in range(2):
        env.step(torch.zeros(NUM_ENVS, 2))
    assert env.metrics() == {"/ended": 1.0}
    env.step(torch.zeros(NUM_ENVS, 2))
    env.step(torch.zeros(NUM_ENVS, 2))  # two rows end here
    assert env.metrics() == {"/ended": 1.5}
    assert env.metrics() == {}


def test_groups_can_be_chosen() -> None:
    def shapes(**groups: Sequence[str]) -> list[tuple[int, ...]]:
        """What the policy sees, what the critic sees, and whole rows."""
        env = RslRlEnv(CountingVecEnv(), **groups)  # type: ignore[arg-type]
        assert env.reset().shape == (NUM_ENVS, *env.spec.observation_space.shape)
        return [env.spec.policy_space.shape, env.spec.critic_space.shape, env.spec.observation_space.shape]

    assert shapes() == [(2,), (3,), (5,)]
    assert shapes(critic_groups=("policy", "critic")) == [(2,), (5,), (7,)]
    both = ("policy", "critic")
    assert shapes(obs_groups=both, critic_groups=both) == [(5,), (5,), (5,)]
    assert shapes(critic_groups=("policy",)) == [(2,), (2,), (2,)]
    with pytest.raises(UserError, match=r"no observations 'state'.*critic, policy"):
        RslRlEnv(CountingVecEnv(), obs_groups=("state",))


def test_the_policys_group_may_be_called_actor_as_in_mjlab() -> None:
    class Renamed(CountingVecEnv):
        def get_observations(self) -> TensorDict:
            return super().get_observations().rename_key_("policy", "actor")

    env = RslRlEnv(Renamed())
    assert (env.spec.policy_space.shape, env.spec.critic_space.shape) == ((2,), (3,))
    assert env.reset().tolist() == [[row, 0, 1, 1, 1] for row in range(NUM_ENVS)]


def test_actions_can_be_limited() -> None:
    theirs = CountingVecEnv()
    env = RslRlEnv(theirs, clip_actions=0.5)
    env.step(torch.full((NUM_ENVS, 2), 3.0))
    assert theirs.last_action is not None
    assert theirs.last_action.tolist() == [[0.5, 0.5]] * NUM_ENVS
    assert isinstance(env.spec.action_space, spaces.Box)
    assert env.spec.action_space.high.tolist() == [0.5, 0.5]


def test_it_is_built_by_name() -> None:
    env = make("rsl-rl:test_rsl_rl:CountingVecEnv", 6, "cpu", 0, length=9)
    assert (env.num_envs, env.step(torch.zeros(6, 2)).obs[0, 1].item()) == (6, 1)
    env.close()


def test_what_is_no_vec_env_is_refused() -> None:
    with pytest.raises(UserError, match="no RSL-RL VecEnv: it has no num_actions, get_observations"):
        RslRlEnv(counting())


def drone_vec_env(num_envs: int, device: str, seed: int) -> VecEnv:
    return RslRlVecEnv(RoughDroneSim(num_envs, device, "hover", seed, episode_seconds=0.5))


FEW: dict[str, Any] = {"total_steps": 16 * 24 * 3, "minibatch_size": 96, "quiet": True}


def test_freerun_trains_a_vec_env_by_name(run_dir: Path) -> None:
    result = freerun.train("rsl-rl:test_rsl_rl:drone_vec_env", num_envs=16, run_dir=run_dir, **FEW)
    assert (result.summary["mode"], result.summary["updates"]) == ("batch", 3)
    assert result.summary["episodes"] > 0


@pytest.mark.parametrize("mode", ["sync", "batch", "continuous"])
def test_freerun_trains_a_vec_env_that_is_there_already(mode: str, run_dir: Path) -> None:
    theirs = CountingVecEnv(16)
    result = freerun.train(theirs, mode=mode, run_dir=run_dir, **FEW)
    assert result.summary["env_steps"] >= FEW["total_steps"]
    assert theirs.is_closed
    with pytest.raises(UserError, match="has 16 environments, not 8"):
        freerun.train(theirs, num_envs=8, run_dir=run_dir.with_name("other"), **FEW)


def test_freerun_trains_a_tensor_env_that_is_there_already(run_dir: Path) -> None:
    env = counting()
    freerun.train(env, run_dir=run_dir, **FEW)
    assert env.is_closed
    policy = json.loads((run_dir / "config.json").read_text())["env"]
    assert policy == "object:Counting"


# ---------------------------------------------------------------------------------------------- freerun's under RSL-RL


def test_rsl_rl_sees_the_same_steps() -> None:
    """There and back: what comes out is what went in, less the final observations, which RSL-RL has no place for."""
    direct, round_trip = counting(), RslRlEnv(RslRlVecEnv(counting()))
    assert torch.equal(direct.reset(), round_trip.reset())
    for _ in range(12):
        action = torch.zeros(NUM_ENVS, 2)
        expected, found = direct.step(action), round_trip.step(action)
        for name in ("obs", "reward", "terminated", "truncated"):
            assert torch.equal(getattr(expected, name), getattr(found, name)), name
    assert round_trip.metrics() == {"simulator/steps": pytest.approx(np.mean(range(1, 13)))}


def test_episode_lengths_can_be_spread() -> None:
    sim = RoughDroneSim(NUM_ENVS, task="hover")
    env = RslRlVecEnv(sim)
    assert env.max_episode_length == sim.max_episode_steps == 500
    env.episode_length_buf = torch.tensor([0, 499, 100, 499])
    extras = env.step(torch.zeros(NUM_ENVS, 4))[3]
    assert extras["time_outs"].tolist() == [False, True, False, True]
    assert env.episode_length_buf.tolist() == [1, 0, 101, 0]


def test_lengths_are_counted_where_the_environment_does_not() -> None:
    env = RslRlVecEnv(counting())
    seen = []
    for _ in range(3):
        env.step(torch.zeros(NUM_ENVS, 2))
        seen.append(env.episode_length_buf.tolist())
    assert seen == [[1, 1, 1, 1], [0, 2, 2, 2], [1, 0, 3, 3]]


def test_actions_must_lie_in_a_box() -> None:
    env = counting()
    env.spec = EnvSpec(env.spec.observation_space, spaces.Discrete(3))
    with pytest.raises(UserError, match="act in a Box"):
        RslRlVecEnv(env)


def test_the_preset_has_rsl_rls_own_settings() -> None:
    theirs = inspect.signature(PPO.__init__).parameters
    ours = settings_of(["rsl-rl"])
    names = {"num_learning_epochs": "num_epochs", "lam": "gae_lambda", "clip_param": "clip_range"}
    names |= {"value_loss_coef": "value_coef"}
    same = ("learning_rate", "desired_kl", "gamma", "entropy_coef", "max_grad_norm")
    for name, here in {**names, **dict(zip(same, same, strict=True))}.items():
        assert ours[here] == theirs[name].default, name
    assert theirs["schedule"].default == "adaptive"
    assert theirs["use_clipped_value_loss"].default is True
    assert ours["value_clip"] == ours["clip_range"]
    assert theirs["normalize_advantage_per_mini_batch"].default is False
    assert ours["advantage_rows"] == "update"
    network = inspect.signature(MLPModel.__init__).parameters
    for name, here in {
        "hidden_dims": "hidden_sizes",
        "activation": "activation",
        "obs_normalization": "normalize_obs",
    }.items():
        assert ours[here] == network[name].default, name


def runner_config() -> dict[str, Any]:
    model = {"class_name": "MLPModel", "hidden_dims": [32, 32], "activation": "elu"}
    return {
        "num_steps_per_env": 8,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**model, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.5}},
        "critic": dict(model),
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2},
    }


def test_rsl_rls_runner_trains_the_drone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real runner, with its real log."""
    env = RslRlVecEnv(RoughDroneSim(16, task="hover", episode_seconds=0.5))
    runner = OnPolicyRunner(env, runner_config(), log_dir=str(tmp_path), device="cpu")
    before = [parameter.clone() for parameter in runner.alg.actor.parameters()]
    runner.learn(num_learning_iterations=5, init_at_random_ep_len=True)
    assert any(not torch.equal(a, b) for a, b in zip(before, runner.alg.actor.parameters(), strict=True))
    text = capsys.readouterr().out
    assert "Learning iteration 4/5" in text
    assert "Mean episode length:" in text
    assert all(math.isfinite(value) for value in runner.logger.rewbuffer)


def test_without_rsl_rl_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['rsl_rl'] = None; import freerun.adapters.rsl_rl_env\n"
        "from freerun.core import UserError\n"
        "try:\n    import freerun.adapters.rsl_rl_vec_env\nexcept UserError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'freerun[rsl-rl]'" in run.stdout, run.stderr
