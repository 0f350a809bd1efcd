"""Makes what a run's settings name: its environments and its algorithm."""

from __future__ import annotations

import sys
from typing import Any

from freerun.adapters.gymnasium_envs import EnvName, GymnasiumFactory
from freerun.adapters.images import IMAGE_ADVICE, images_go_raw
from freerun.adapters.isaac_launch import is_isaac_task
from freerun.adapters.tensor_envs import TensorEnvs, find_builder, is_only_tensors
from freerun.algorithms.learners.compiled_kernel import set_kernel_threads, useful_threads
from freerun.algorithms.policies.memory_actor import MemoryActor
from freerun.algorithms.policies.mlp_actor import MLPActor
from freerun.collecting.rollouts.episode_numbers import RESETS_ITSELF
from freerun.core import (
    Acceleration,
    Algorithm,
    ComputedBy,
    Demand,
    EnvSpec,
    HandedOver,
    LearnerGroup,
    RepeatedSeed,
    RunSeed,
    UserError,
    callable_name,
    is_found_by_name,
)
from freerun.settings.config import AnyConfig, TrainConfig
from freerun.settings.registry import ALGORITHMS, DEFAULT_TENSOR_MODE, MODES, find_algorithm, find_mode, find_tracker


def make_envs(config: AnyConfig, learner: int = 0) -> GymnasiumFactory | TensorEnvs:
    """The environments of a run, or those of one of several learners, whose simulators have seeds of their own."""
    if not is_tensors(config):
        return make_factory(config)
    if config.max_episode_steps is not None:
        raise UserError(
            "--max-episode-steps is not for environments that are tensors: they have a time limit of their own"
        )
    if config.wrap is not None:
        raise UserError("--wrap is not for environments that are tensors: leave it out")
    num_simulators = config.num_workers or 1
    return make_tensors(config, config.collector.num_envs, num_simulators, config.seed + learner * num_simulators)


def is_tensors(config: AnyConfig) -> bool:
    """True if the environment is stepped as tensors: if it can be, and the mode can do it."""
    can_be = find_mode(config.mode).traits.tensors is not None
    if is_only_tensors(config.env) and not can_be:
        able = [name for name, mode in MODES.items() if mode.traits.tensors is not None]
        raise UserError(f"{config.env} is stepped as tensors, which --mode {config.mode} cannot: use {', '.join(able)}")
    return can_be and find_builder(config.env) is not None


def resizable_settings(env: EnvName, mode: str) -> frozenset[str]:
    """The settings of a mode that --adapt may change while a run on this environment goes on."""
    traits = find_mode(mode).traits
    if find_builder(env) is not None and traits.tensors is not None:
        return traits.tensors.resizable
    return frozenset() if is_only_tensors(env) else traits.resizable


def acceleration(config: AnyConfig) -> Acceleration:
    """How environments that are tensors are stepped on a GPU."""
    has_own = find_algorithm(config.algo).traits.has_acceleration
    return config.algorithm.acceleration if has_own else "auto"


def hands_over_episodes(config: AnyConfig) -> bool:
    """True if workers hand over whole episodes, so that nothing arrives before one has ended."""
    is_cut = bool(config.collector.segment_steps) or is_tensors(config)
    return find_mode(config.mode).traits.whole_episodes and not is_cut


def episodes_per_update(config: AnyConfig) -> int | None:
    """Return how many whole episodes each update learns from; None if the algorithm counts steps instead."""
    counted = find_algorithm(config.algo).traits.counts_episodes
    return config.algorithm.episodes_per_update if counted else None


def episode_remedy(config: AnyConfig, demand: Demand) -> str | None:
    """Say what to do about episodes that do not end, in flags that this run has; None if nobody waits for their end."""
    mode = find_mode(config.mode).traits
    if not hands_over_episodes(config) or (mode.takes_turns and not demand.whole_episodes):
        return None
    flags = "--max-episode-steps" if config.max_episode_steps is None else "a smaller --max-episode-steps"
    has_segments = mode.hands_over is HandedOver.EPISODES_OR_SEGMENTS
    can_be_cut = has_segments and not (demand.episodes or config.deterministic)
    return f"give {flags}" + (" or --segment-steps" if can_be_cut else "")


def make_tensors(config: AnyConfig, num_envs: int, num_shares: int, seed: int) -> TensorEnvs:
    env_args: dict[str, Any] = dict(config.env_args)
    if is_isaac_task(config.env):
        env_args["headless"] = config.headless
    unused = _policy_group_only(config), _ignores_masks(config)
    return TensorEnvs(config.env, num_envs, num_shares, config.device, seed, env_args, *unused)


def make_factory(config: AnyConfig) -> GymnasiumFactory:
    return GymnasiumFactory(*env_recipe(config))


def run_seed(config: AnyConfig) -> RunSeed:
    """Return what the episodes of a run are seeded by.

    Only the trainings of a series need seeds that tell them apart, and tensors have one seed for all episodes.
    """
    return config.seed if config.env_settings.series() or is_tensors(config) else RepeatedSeed(config.seed)


def _policy_group_only(config: AnyConfig) -> bool:
    """True if the algorithm has no use for observations that only a value function may see."""
    return not find_algorithm(config.algo).traits.has_critic_group


def _ignores_masks(config: AnyConfig) -> bool:
    return not find_algorithm(config.algo).traits.has_action_mask


def env_recipe(config: AnyConfig) -> tuple[EnvName, dict[str, Any], int | None, bool, bool, str | None]:
    """Return what the environments of a run are made of: the arguments of a `GymnasiumFactory`."""
    if is_only_tensors(config.env):
        raise UserError(
            f"{config.env} is stepped as tensors, never alone, and this needs environments that are stepped alone"
        )
    env, env_args = config.env_settings.recipe(config.env, config.env_args)
    unused = _policy_group_only(config), _ignores_masks(config)
    return env, env_args, config.max_episode_steps, *unused, config.wrap


def make_algorithm(
    config: AnyConfig, factory: GymnasiumFactory | TensorEnvs, peers: LearnerGroup | None = None
) -> Algorithm:
    import torch  # here and not above: `freerun list` and the workers do without it

    device = config.device
    try:
        torch.zeros(1, device=device)  # torch refuses a device only when it is used
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used: {str(error).splitlines()[0]}; try --device cpu") from None
    limit_threads(1, 1)  # first weights do not depend on --learner-threads
    if device.startswith("cuda") and not config.deterministic:
        torch.set_float32_matmul_precision("high")  # TF32: small networks need no more digits
    # Torch keeps this for the whole process, so it is also switched off again after a run that needed it.
    torch.use_deterministic_algorithms(config.deterministic)
    _check_actions(config, factory.spec)
    _check_episodes(config, factory.spec)
    algorithm = find_algorithm(config.algo).load()
    made: Algorithm = algorithm(factory.spec, config.algorithm, config.seed, device, config.deterministic, peers)
    if config.learner_threads != "auto":
        set_learner_threads(config, made, config.learner_threads)
    return made


def settings_in_use(config: AnyConfig, algorithm: Algorithm) -> Any:
    """Return the settings as the algorithm uses them: it chooses a network by the environment."""
    return getattr(algorithm, "config", config.algorithm)  # not all algorithms of users keep their settings


def computed_by(config: AnyConfig, algorithm: Algorithm) -> ComputedBy:
    """Return who computes the gradients."""
    declared = find_algorithm(config.algo).traits.computed_by
    return "torch" if declared is None else declared(settings_in_use(config, algorithm), config.device)


def has_open_threads(config: AnyConfig, algorithm: Algorithm) -> bool:
    """True if --learner-threads auto may change the number of threads while a run goes on."""
    made_by = computed_by(config, algorithm)
    if config.learner_threads != "auto" or config.device != "cpu":
        return False
    # Never numpy's: where another program takes a core, its two threads wait for each other at every product, and an
    # update lasts many times as long before anybody can react. Torch's lose less, but their number changes its sums.
    return made_by == "kernel" or (made_by == "torch" and not config.deterministic)


def most_learner_threads(config: AnyConfig, algorithm: Algorithm, num_cores: int) -> int:
    """Return how many threads can be of use to the learner on this number of cores."""
    minibatch_setting = find_algorithm(config.algo).traits.minibatch_setting
    if computed_by(config, algorithm) != "kernel" or minibatch_setting is None:
        return num_cores
    return min(num_cores, useful_threads(getattr(settings_in_use(config, algorithm), minibatch_setting)))


def set_learner_threads(config: AnyConfig, algorithm: Algorithm, num_threads: int) -> None:
    """Let whoever computes the gradients do so on this many threads from now on."""
    made_by = computed_by(config, algorithm)
    of_torch, of_numpy, of_kernel = (num_threads if who == made_by else 1 for who in ("torch", "numpy", "kernel"))
    limit_threads(of_torch, of_numpy, of_kernel)


def limit_threads(of_torch: int, of_numpy: int, of_kernel: int = 1) -> None:
    """Limit the threads of torch, of numpy's linear algebra and of the fast learner's kernel, which would otherwise
    take the workers' cores.

    Only one of them may have several. Each group waits for its next piece of work without going to sleep, so
    that a product in numpy after one in torch would find its cores taken, and last many times as long.
    """
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(of_torch)
    threadpool_limits(of_numpy, "blas")
    set_kernel_threads(of_kernel)


def _check_actions(config: AnyConfig, spec: EnvSpec) -> None:
    """Refuse an action space that the algorithm cannot learn."""
    kinds = find_algorithm(config.algo).traits.action_spaces
    if not isinstance(spec.action_space, kinds):
        able = [name for name, entry in ALGORITHMS.items() if isinstance(spec.action_space, entry.traits.action_spaces)]
        raise UserError(
            f"--algo {config.algo} needs actions in a {' or '.join(kind.__name__ for kind in kinds)}, not "
            f"{spec.action_space}: choose --algo {' or '.join(able)}"
        )


def starts_own_episodes(config: AnyConfig, spec: EnvSpec) -> bool:
    """True if the environments of a worker start their episodes by themselves, so that no seed decides an episode."""
    num_workers = config.num_workers or 1
    shares_calls = not is_tensors(config) and config.collector.envs_at_once(num_workers) > num_workers
    return shares_calls and not spec.batch_reset.seeds_episodes


def _check_episodes(config: AnyConfig, spec: EnvSpec) -> None:
    """Refuse to wait for whole episodes of environments that start the next one at once."""
    if starts_own_episodes(config, spec) and hands_over_episodes(config):
        remedy = "leave --deterministic out, " if config.deterministic else "give --segment-steps 32, "
        raise UserError(f"{RESETS_ITSELF}: {remedy}or have one environment per worker")


def cautions(config: AnyConfig, factory: GymnasiumFactory | TensorEnvs, algorithm: Algorithm) -> list[str]:
    """Return what the user should know before a run begins, although it can begin: a sentence for each thing."""
    found = []
    traits = find_algorithm(config.algo).traits
    if factory.image_shape is not None and isinstance(algorithm.policy, MLPActor | MemoryActor):
        raw = images_go_raw(factory.image_shape)
        if factory.spec.images:
            remedy = "leave --network mlp out" if traits.has_network else f"choose --algo {_first_with_network()}"
            advice = f"{remedy}, and they get a CNN (docs/images.md)"
        else:
            first = "" if traits.has_network else f"choose --algo {_first_with_network()} and "
            advice = f"{first}{IMAGE_ADVICE}"
        found.append(f"{raw}; {advice}")
    if factory.hides_critic_group:
        able = [name for name, entry in ALGORITHMS.items() if entry.traits.has_critic_group]
        found.append(
            f'the "critic" observations are not used: the value function of --algo {config.algo} sees what the policy '
            f"sees (--algo {' or '.join(able)} uses them)"
        )
    if starts_own_episodes(config, factory.spec):
        found.append(
            "the vector environment starts its episodes by itself: only the first of each worker are seeded, so that "
            "this run cannot be repeated (docs/own_environment.md)"
        )
    if factory.hides_masks:
        able = [name for name, entry in ALGORITHMS.items() if entry.traits.has_action_mask]
        found.append(
            f"the environment's action masks are not used: masks are for discrete actions, with --algo "
            f"{' or '.join(able)}"
        )
    named: dict[str, Any] = {"environment": config.env, "algorithm": config.algo, "mode": config.mode}
    named |= {what: getattr(config.algorithm, what) for what in traits.code_settings}
    for what, given in named.items():
        if given is not None and not is_found_by_name(given):
            found.append(
                f"the {what} {callable_name(given)} can be used in this program only{_script()}: other programs, such "
                "as freerun eval, cannot import it; to use the run later, define it at the top level of a module"
            )
    return found


def _first_with_network() -> str:
    """Return an algorithm that takes networks of the user's own."""
    return next(name for name, entry in ALGORITHMS.items() if entry.traits.has_network)


def _script() -> str:
    """Return where this program lies, for whoever reads the log later."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return "" if path is None else f" ({path})"


def _check_traits(config: AnyConfig) -> None:
    """Refuse settings that contradict what the mode declares."""
    traits, mode = find_mode(config.mode).traits, f"--mode {config.mode}"
    if config.deterministic and not traits.deterministic:
        raise UserError(
            f"{mode} cannot be --deterministic, because it does not hand over whole episodes in a fixed order: "
            f"choose --mode {TrainConfig.mode} (or any other that hands over whole episodes)"
        )
    if config.max_lag and traits.takes_turns:
        raise UserError(
            f"{mode} collects and learns in turns, so --max-lag must be 0: choose --mode {TrainConfig.mode} to collect "
            "while the learner updates"
        )
    if config.max_lag is not None and traits.never_waits:
        raise UserError(
            f"{mode} never waits, so it cannot keep to a --max-lag: leave it out, or choose --mode "
            f"{DEFAULT_TENSOR_MODE} or {TrainConfig.mode}, which honour it"
        )


def check_fit(config: AnyConfig, algorithm: Algorithm) -> None:
    """Refuse a mode, a display or a tracker that cannot serve this run."""
    if config.display == "classic" and episodes_per_update(config) is None:
        raise UserError("--display classic counts episodes: give --episodes-per-update")
    if not is_tensors(config):  # those modes have sentences of their own
        _check_traits(config)
    config.collector.check(algorithm.demand())
    for name in config.tracking.track:
        if (package := find_tracker(name).traits.package) is not None:
            package.require(f"--track {name}")
    if config.collector.rates_segments and not find_algorithm(config.algo).traits.rates_segments:
        able = [name for name, entry in ALGORITHMS.items() if entry.traits.rates_segments]
        raise UserError(
            "--queue-priority td-error needs an algorithm with a critic that learns off-policy: "
            f"--algo {' or '.join(able)}"
        )
