"""Environments and workers, which may outlast one training."""

from __future__ import annotations

import functools
from typing import Any, cast

import gymnasium

from freerun.adapters.gymnasium_envs import EnvName, GymnasiumFactory
from freerun.adapters.tensor_envs import TensorEnvs, is_only_tensors
from freerun.collecting.env_args_channel import EnvArgsChannel, with_env_args
from freerun.collecting.scheduling.joint_collector import JointCollector, share_of_start
from freerun.collecting.tensors.simulator_evaluation import check_evaluation
from freerun.core import (
    Algorithm,
    BatchablePolicy,
    Collector,
    CollectorSettings,
    LearnerGroup,
    ModeOptions,
    Policy,
    PriorityCollector,
    RatingAlgorithm,
    ReusableCollector,
    SharedSeed,
    SingleLearner,
    StartPoint,
    UserError,
    background_stages,
)
from freerun.persistence.incidents import IncidentFile
from freerun.run.actor_cost import act_seconds
from freerun.run.self_tuning import tuning_bounds
from freerun.settings.config import AnyConfig
from freerun.settings.factories import acceleration, hands_over_episodes, run_seed
from freerun.settings.registry import WORKER_MODULES, find_mode
from freerun.transport import processes
from freerun.transport.state_tracks import SharedTracks


class Pool:
    """Environments and workers, for one training or for several that follow each other without a restart."""

    def __init__(self, factory: GymnasiumFactory | TensorEnvs, changes_env_args: bool = False):
        """With `changes_env_args`, arguments of the environments may change while they run."""
        self.factory = factory
        self.env_args: EnvArgsChannel | None = None
        """What changes them; None if they cannot change, as those of tensors."""
        if changes_env_args and isinstance(factory, GymnasiumFactory):
            self.env_args = EnvArgsChannel()
            self.factory = factory.with_changes_from(self.env_args.box)
        self.tracks: SharedTracks | None = None
        self.incidents = IncidentFile()
        self.act_seconds = 0.0
        """How long the workers' policy takes for one action; 0 if workers choose none."""
        self._collector: ReusableCollector | None = None
        self._shape: dict[str, Any] = {}
        """What the policy of the workers is like, besides its weights."""

    def collector(
        self, config: AnyConfig, algorithm: Algorithm, start: StartPoint, peers: LearnerGroup | None = None
    ) -> Collector:
        """Return the collector of a training. It uses the workers that the pool has, or starts new ones."""
        peers = peers or SingleLearner()
        shape = _shape(algorithm.policy)
        if self._collector is not None and shape == self._shape:
            self._collector.renew(start)
        else:
            if self._collector is not None:  # its workers hold a policy that cannot take these weights
                self._collector.close()
            self._collector, self._shape = self._start(config, algorithm, start, peers), shape
        if peers.count == 1:
            return self._collector
        takes_turns = find_mode(config.mode).traits.takes_turns
        limits = (self.factory.spec.max_episode_steps, config.deterministic)
        return JointCollector(self._collector, peers, start, hands_over_episodes(config), takes_turns, *limits)

    def _start(
        self, config: AnyConfig, algorithm: Algorithm, start: StartPoint, peers: LearnerGroup
    ) -> ReusableCollector:
        num_workers = config.num_workers or 1
        bounds = tuning_bounds(config)
        num_tracks = num_workers if bounds is None else bounds.max_workers
        if not isinstance(self.factory, TensorEnvs):
            # The fork server reads this list once, when it starts; so nothing may have started it before.
            processes.preload(worker_modules(config.env))
        stages = background_stages(algorithm)
        # `TimeShares` relies on this order: workers, the learner, its stages.
        names = [*(f"worker {worker}" for worker in range(num_tracks)), "learner", *stages]
        self.tracks = SharedTracks(processes.context(), names)
        for track, stage in enumerate(stages.values(), start=num_tracks + 1):
            stage.note = functools.partial(self.tracks.set_state, track)
        settings = CollectorSettings(
            num_workers,
            config.max_lag,
            # Each of several learners plays episodes that no other one plays.
            run_seed(config) if peers.count == 1 else SharedSeed(config.seed, peers.index, peers.count),
            config.deterministic,
            self.tracks,
            config.step_timeout,
            config.max_failures,
            config.on_nan or "stop",
            self.incidents,
            acceleration(config),
            start if peers.count == 1 else share_of_start(start, peers),
            bounds,
            self.factory.spec.max_episode_steps,
            config.mode,
        )
        mode = find_mode(config.mode)
        collector: Any
        if isinstance(self.factory, TensorEnvs):
            if config.eval_every is not None and is_only_tensors(config.env):
                check_evaluation(self.factory.envs[0], config.eval_episodes)  # now, before the run has a folder
            collector = mode.load_for_tensors()(self.factory.envs, algorithm.policy, settings, config.collector)
        else:
            options = [] if mode.traits.options is ModeOptions else [config.collector]
            policy = algorithm.policy
            if not mode.traits.lockstep:
                self.act_seconds = act_seconds(policy, self.factory.spec)
            if config.collector.acts_on_device:
                policy = _on_device(policy, config)
            if self.env_args is not None:
                policy = with_env_args(policy, self.env_args)
            collector = mode.load()(self.factory, policy, settings, *options)
        if config.collector.rates_segments:  # `check_fit` has refused algorithms that cannot rate them
            cast(PriorityCollector, collector).prefer(cast(RatingAlgorithm, algorithm).importance)
        return collector  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._collector is not None:
            self._collector.close()
        self.incidents.close()


def _shape(policy: Policy) -> dict[str, Any]:
    """Return all that the workers' policy must share with one whose weights they are to take."""
    return {**policy.describe(), "arrays": {name: array.shape for name, array in policy.arrays.items()}}


def _on_device(policy: Policy, config: AnyConfig) -> Policy:
    """Return the policy with its network on the learner's device."""
    if config.deterministic:
        raise UserError(
            "--deterministic needs actions that do not depend on how many environments share a batch: leave "
            "--act-on-device out"
        )
    if not isinstance(policy, BatchablePolicy):
        raise UserError(f"the policy of --algo {config.algo} cannot act in batches: leave --act-on-device out")
    return policy.batched_on(config.device)


def worker_modules(env: EnvName) -> list[str]:
    """Return the modules that workers need, with that of a registered environment. The fork server loads them once, so
    they cost each worker neither time nor memory."""
    spec = gymnasium.registry.get(env) if isinstance(env, str) else None
    own = [spec.entry_point.partition(":")[0]] if spec and isinstance(spec.entry_point, str) else []
    return [*WORKER_MODULES, *own]
