"""Environments and workers, which may outlast one training."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import gymnasium

from freerun.collectors.joint import Joint, share_of_start
from freerun.config import NoOptions, TrainConfig
from freerun.core import Algorithm, Alone, Collector, CollectorSettings, Peers, Renewable, Room, SharedSeed, Start
from freerun.envs.gymnasium import EnvName, GymnasiumFactory
from freerun.envs.tensors import TensorEnvs
from freerun.persistence.incidents import IncidentFile
from freerun.registry import MODES, WORKER_MODULES, lookup
from freerun.transport import processes
from freerun.transport.tracks import Tracks

DEFAULT_MOST_ENVS_PER_WORKER = 8


class Pool:
    """Environments and workers, for one training or for several that follow each other without a restart."""

    def __init__(self, factory: GymnasiumFactory | TensorEnvs):
        self.factory = factory
        self.tracks: Tracks | None = None
        self.incidents = IncidentFile()
        self._collector: Renewable | None = None

    def collector(
        self, config: TrainConfig[Any, Any], algorithm: Algorithm, start: Start, peers: Peers | None = None
    ) -> Collector:
        """The workers that are there, or new ones."""
        peers = peers or Alone()
        if self._collector is None:
            self._collector = self._start(config, algorithm, start, peers)
        else:
            self._collector.renew(start)
        if peers.count == 1:
            return self._collector
        mode = lookup("mode", config.mode, MODES)
        whole = mode.whole_episodes and getattr(config.collector, "segment_steps", None) is None
        return Joint(self._collector, peers, start, whole, mode.takes_turns)

    def _start(self, config: TrainConfig[Any, Any], algorithm: Algorithm, start: Start, peers: Peers) -> Renewable:
        num_workers = config.num_workers or 1
        room = room_for(config)
        num_tracks = num_workers if room is None else room.most_workers
        if not isinstance(self.factory, TensorEnvs):  # before anything starts the fork server, which looks only then
            processes.preload(worker_modules(config.env))
        stages: Mapping[str, Any] = getattr(algorithm, "stages", {})
        names = [*(f"worker {worker}" for worker in range(num_tracks)), "learner", *stages]
        self.tracks = Tracks(processes.context(), names)
        for track, stage in enumerate(stages.values(), start=num_tracks + 1):
            stage.note = functools.partial(self.tracks.enter, track)
        settings = CollectorSettings(
            num_workers,
            config.max_lag,
            config.seed if peers.count == 1 else SharedSeed(config.seed, peers.index, peers.count),
            config.deterministic,
            self.tracks,
            config.step_timeout,
            config.max_failures,
            config.on_nan or "stop",
            self.incidents,
            getattr(config.algorithm, "acceleration", "auto"),
            start if peers.count == 1 else share_of_start(start, peers),
            room,
        )
        mode = lookup("mode", config.mode, MODES)
        if isinstance(self.factory, TensorEnvs):
            return mode.load_for_tensors()(self.factory.envs, algorithm.policy, settings, config.collector)  # type: ignore[no-any-return]
        options = [] if isinstance(config.collector, NoOptions) else [config.collector]
        collector = mode.load()(self.factory, algorithm.policy, settings, *options)
        if getattr(config.collector, "queue_priority", None) == "td-error":
            collector.prefer(algorithm.importance)  # type: ignore[attr-defined]
        return collector  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._collector is not None:
            self._collector.close()
        self.incidents.close()


def room_for(config: TrainConfig[Any, Any]) -> Room | None:
    """How far a mode may be moved while it runs, with --adapt."""
    bounds = config.adapting
    if not bounds.adapt:
        return None
    has_one = config.mode == "batch"
    return Room(
        1 if has_one else bounds.adapt_max_workers or 1,
        bounds.adapt_max_envs_per_worker or DEFAULT_MOST_ENVS_PER_WORKER,
        bounds.adapt_max_queue_size,
    )


def worker_modules(env: EnvName) -> list[str]:
    """What workers need, with a registered environment's own module: loaded in the fork server, it costs them neither
    time nor memory."""
    spec = gymnasium.registry.get(env) if isinstance(env, str) else None
    own = [spec.entry_point.partition(":")[0]] if spec and isinstance(spec.entry_point, str) else []
    return [*WORKER_MODULES, *own]
