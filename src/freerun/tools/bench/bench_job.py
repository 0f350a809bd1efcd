"""Runs one measurement in a process of its own: reads a job from stdin and prints its figures."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from freerun.adapters.gymnasium_envs import GymnasiumFactory
from freerun.adapters.isaac_launch import is_isaac_task, start_app
from freerun.core import EnvFailure, SimulatorThreadCollector, StartPoint, UserError
from freerun.settings.config import TrainConfig
from freerun.settings.flag_parsing import EnvArgs
from freerun.settings.registry import find_mode
from freerun.telemetry.budget import Budget
from freerun.telemetry.ledger import Ledger
from freerun.tools.bench import bare_limit
from freerun.tools.bench.load_meter import Load, LoadMeter, own_megabytes
from freerun.transport import processes

BARE = "bare"
FIGURES = "freerun-figures: "
"""The line with a job's figures begins with this: a simulator may print lines of its own, also when it ends."""
WARM_UP_UPDATES = 2
"""Updates before the measurement begins; one is enough where it takes longer than what is to be measured."""
LEARNING_RATE = 1e-12
"""Updates are computed in full and change nothing: episodes stay as long, however many updates a mode makes."""
MINIBATCH_SIZE = 2000
ONLY_MEASURED = ("learning_rate", "quiet")
"""Settings that a run has only for the sake of the measurement. The command that a report advises leaves them out."""
PICTURE_SECONDS = 5.0
"""The timeline of a run shows this many seconds at its end."""


@dataclass(frozen=True)
class Job:
    env: str
    mode: str
    """A mode, or `bare`."""
    num_workers: int
    seconds: float
    steps_per_update: int = 0
    episodes_per_update: int = 0
    """The same for modes that hand over whole episodes."""
    num_epochs: int = 4
    env_args: EnvArgs = field(default_factory=dict)
    max_episode_steps: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the mode that were named in its label. They win over those that follow from the number of workers."""
    picture: str | None = None
    """The file to draw the timeline into."""
    device: str = "cpu"
    is_tensors: bool = False
    """Environments are stepped as tensors; `num_workers` is their number."""

    def config(self) -> dict[str, Any]:
        """Return the settings of a run. The work is the same in every mode: updates of the same size."""
        return {
            "env": self.env,
            "env_args": self.env_args,
            "max_episode_steps": self.max_episode_steps,
            "mode": self.mode,
            **self._update(),
            "num_epochs": self.num_epochs,
            **({} if self.is_tensors else {"minibatch_size": min(MINIBATCH_SIZE, self.steps_per_update)}),
            **({} if self.device == TrainConfig.device else {"device": self.device}),
            "learning_rate": LEARNING_RATE,
            "quiet": True,
            **self._scale(),
            **self.settings,
        }

    def _update(self) -> dict[str, int]:
        if (
            not self.is_tensors
            and find_mode(self.mode).traits.whole_episodes
            and "segment_steps" not in self.settings
            and self.episodes_per_update
        ):
            return {"episodes_per_update": self.episodes_per_update}
        return {"steps_per_update": self.steps_per_update}

    def _scale(self) -> dict[str, Any]:
        """Settings for one environment per worker, or for as many environments where the mode has one worker."""
        steps_per_env = max(1, self.steps_per_update // self.num_workers)
        traits = find_mode(self.mode).traits
        if self.is_tensors:
            assert traits.tensors is not None  # `bench_cases` leaves the other modes out
            return traits.tensors.bench_settings(self.num_workers, steps_per_env)
        return traits.bench_settings(self.num_workers, steps_per_env)


class Stopwatch:
    """A sink that lets the first updates pass, and then measures from the end of an update to that of another."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._warm_up_updates = self._updates = 0
        self._meter: LoadMeter | None = None
        self.began = self.ended = 0.0
        self._first = (0, 0.0)
        self._busy: dict[str, float] = {"workers_busy_share": 0.0, "learner_updating_share": 0.0}
        self.is_over = False
        self.figures: dict[str, float] = {}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._meter is None:
            self._warm_up_updates += 1
            if self._warm_up_updates == WARM_UP_UPDATES or metrics["interval_seconds"] > self._seconds:
                self._meter = LoadMeter()
                self.began, self._first = time.perf_counter(), (step, metrics["episodes"])
            return
        self._updates += 1
        for name in self._busy:
            self._busy[name] += metrics.get(name, 0.0) * metrics["interval_seconds"]
        elapsed = time.perf_counter() - self.began
        if elapsed >= self._seconds:
            self.ended, self.is_over = self.began + elapsed, True
            self._finish(step, metrics, elapsed, self._meter.read())

    def _finish(self, step: int, metrics: Mapping[str, float], elapsed: float, load: Load) -> None:
        self.figures = {
            "steps_per_second": (step - self._first[0]) / elapsed,
            "episodes_per_second": (metrics["episodes"] - self._first[1]) / elapsed,
            "updates": self._updates,
            "measured_seconds": elapsed,
            "cpu_percent": load.own,
            "others_percent": load.others,
            "dropped_steps": metrics.get("dropped_steps", 0.0),
            **{name: min(1.0, seconds / elapsed) for name, seconds in self._busy.items()},
        }

    def close(self) -> None:
        """Do nothing, because nothing is held."""


@dataclass(frozen=True)
class Until(Budget):
    """A budget that ends the run when the stopwatch has seen enough."""

    total_steps: None = None
    total_episodes: None = None
    stopwatch: Stopwatch = field(kw_only=True)

    def progress(self, ledger: Ledger) -> float:
        return 1.0 if self.stopwatch.is_over else 0.0


def measure(job: Job) -> dict[str, float]:
    """Run a job and return its figures."""
    if job.is_tensors and is_isaac_task(job.env):
        start_app(job.device, headless=True)  # before torch is imported
    if job.mode == BARE and job.is_tensors:
        from freerun.tools.bench import bare_simulator

        return bare_simulator.measure(job.env, job.env_args, job.num_workers, job.device, job.seconds)
    if job.mode == BARE:
        return bare_limit.measure(
            GymnasiumFactory(job.env, job.env_args, job.max_episode_steps), job.num_workers, job.seconds
        )
    # Imported here, because the memory of the bare limit must not include what only a mode needs.
    from freerun.run.pool import Pool
    from freerun.settings.defaults import complete
    from freerun.settings.factories import make_algorithm, make_envs
    from freerun.settings.registry import make_config
    from freerun.telemetry.machine_load import MachineLoad
    from freerun.telemetry.time_shares import TimeShares
    from freerun.telemetry.timeline import FILE_NAME
    from freerun.telemetry.timeline_recorder import TimelineRecorder
    from freerun.training import train

    config = complete(make_config(job.config()))
    pool = Pool(make_envs(config))
    with tempfile.TemporaryDirectory() as folder:
        try:
            algorithm = make_algorithm(config, pool.factory)
            config.collector.check(algorithm.demand())
            began = time.perf_counter()
            collector = pool.collector(config, algorithm, StartPoint())
            startup_seconds = time.perf_counter() - began
            assert pool.tracks is not None
            timeline = TimelineRecorder(Path(folder) / FILE_NAME, pool.tracks, collector.counts, MachineLoad(None))
            recorded_since = time.perf_counter()
            stopwatch, shares = Stopwatch(job.seconds), TimeShares(collector.num_workers, pool.tracks)

            def learn() -> None:
                train(algorithm, collector, Until(stopwatch=stopwatch), Ledger(), [stopwatch], (), shares)

            if isinstance(collector, SimulatorThreadCollector):
                collector.run_with_learner(learn)
            else:
                learn()
            timeline.close()
            memory = own_megabytes()
        finally:
            pool.close()
        if job.picture is not None:
            span = (stopwatch.began - recorded_since, stopwatch.ended - recorded_since)
            _draw(Path(folder), Path(job.picture), *span)
    return {**stopwatch.figures, "startup_seconds": startup_seconds, "memory_megabytes": memory}


def _draw(folder: Path, path: Path, start: float, stop: float) -> None:
    from freerun.telemetry.timeline import RecordedTimeline
    from freerun.tools.plots.drawing import can_draw
    from freerun.tools.plots.timeline_panels import write_picture

    recording = RecordedTimeline.of(folder)
    if recording is not None and can_draw():  # without matplotlib the report says that pictures are missing
        write_picture(recording, max(start, stop - PICTURE_SECONDS), stop, path)


def packed(job: Job) -> str:
    """Return the job as the text that `main` reads from stdin."""
    return json.dumps(asdict(job))


def main() -> int:
    processes.end_with_parent()  # also if the bench is killed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        figures = measure(Job(**json.loads(sys.stdin.read())))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except EnvFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{FIGURES}{json.dumps(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
