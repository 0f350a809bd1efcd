"""What a run's settings name, made: its environments and its algorithm."""

from __future__ import annotations

from typing import Any

from freerun.config import TrainConfig
from freerun.core import Algorithm, Peers, UserError
from freerun.envs import CYBER_ENVS
from freerun.envs.gymnasium import EnvName, GymnasiumFactory
from freerun.envs.isaac_launch import is_isaac_task
from freerun.envs.tensors import TensorEnvs, find_builder, is_only_tensors
from freerun.envs.workflow import DEFAULT_COMPLIANCE_WEIGHT, SEPARATOR, WorkflowEnv
from freerun.registry import ALGORITHMS, MODES, TRACKERS, lookup


def make_envs(config: TrainConfig[Any, Any]) -> GymnasiumFactory | TensorEnvs:
    if not is_tensors(config):
        return make_factory(config)
    if config.max_episode_steps is not None:
        raise UserError(
            "--max-episode-steps is not for environments that are tensors: they have a time limit of their own"
        )
    return make_tensors(config, config.collector.num_envs, config.num_workers or 1, config.seed)


def is_tensors(config: TrainConfig[Any, Any]) -> bool:
    """Whether the environment is stepped as tensors: if it can be, and the mode can do it."""
    can_be = lookup("mode", config.mode, MODES).for_tensors is not None
    if is_only_tensors(config.env) and not can_be:
        able = [name for name, mode in MODES.items() if mode.for_tensors is not None]
        raise UserError(f"{config.env} is stepped as tensors, which --mode {config.mode} cannot: use {', '.join(able)}")
    return can_be and find_builder(config.env) is not None


def make_tensors(config: TrainConfig[Any, Any], num_envs: int, num_shares: int, seed: int) -> TensorEnvs:
    env_args: dict[str, Any] = dict(config.env_args)
    if is_isaac_task(config.env):
        env_args["headless"] = config.headless
    return TensorEnvs(config.env, num_envs, num_shares, config.device, seed, env_args)


def make_factory(config: TrainConfig[Any, Any]) -> GymnasiumFactory:
    return GymnasiumFactory(*env_recipe(config))


def env_recipe(config: TrainConfig[Any, Any]) -> tuple[EnvName, dict[str, Any], int | None]:
    """What the environments of a run are made of, under its workflows if it has any: name, arguments, time limit."""
    if is_only_tensors(config.env):
        raise UserError(
            f"{config.env} is stepped as tensors, never alone: leave out --eval-every, and use freerun eval afterwards"
        )
    cyber, orders = config.cyber, config.cyber.orders()
    names = ("red_agent", "episode_steps", "cyborg_path")
    given = {name: value for name in names if (value := getattr(cyber, name)) is not None}
    if (given or orders) and config.env not in CYBER_ENVS:
        flag = f"--{next(iter(given), 'workflow').replace('_', '-')}"
        raise UserError(f"{flag} is for cyber-defence environments: {' and '.join(CYBER_ENVS)}")
    if "cyborg_path" in given:
        given["cyborg_path"] = str(given["cyborg_path"])
    if not orders:
        return config.env, {**config.env_args, **given}, config.max_episode_steps
    weight = DEFAULT_COMPLIANCE_WEIGHT if cyber.compliance_weight is None else cyber.compliance_weight
    workflow = {"env_id": config.env, "workflows": SEPARATOR.join(orders), "compliance_weight": weight}
    return WorkflowEnv, {**workflow, **config.env_args, **given}, config.max_episode_steps


def make_algorithm(
    config: TrainConfig[Any, Any], factory: GymnasiumFactory | TensorEnvs, peers: Peers | None = None
) -> Algorithm:
    import torch  # here and not above: `freerun list` and the workers do without it

    device = config.device
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used: {str(error).splitlines()[0]}; try --device cpu") from None
    torch.set_num_threads(config.learner_threads)
    if device.startswith("cuda") and not config.deterministic:
        torch.set_float32_matmul_precision("high")  # TF32: small networks need no more digits
    torch.use_deterministic_algorithms(config.deterministic)
    algorithm = lookup("algorithm", config.algo, ALGORITHMS).load()
    made: Algorithm = algorithm(factory.spec, config.algorithm, config.seed, device, config.deterministic, peers)
    return made


def check_fit(config: TrainConfig[Any, Any], algorithm: Algorithm) -> None:
    """Whether the mode and the display can serve the algorithm."""
    if config.display == "classic" and getattr(config.algorithm, "episodes_per_update", None) is None:
        raise UserError("--display classic counts episodes: give --episodes-per-update")
    config.collector.check(algorithm.demand())
    for name in config.tracking.track:
        TRACKERS[name].load()  # says which package is missing
    if getattr(config.collector, "queue_priority", None) == "td-error" and not hasattr(algorithm, "importance"):
        raise UserError(
            "--queue-priority td-error needs an algorithm with a critic that learns off-policy: --algo sac or mbpo"
        )
