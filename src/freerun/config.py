"""The settings of a run: flags of `freerun train`, keys of config.json and arguments of `freerun.train()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

import tyro

from freerun.adapting.options import AdaptConfig
from freerun.core import ModeOptions, UserError, require_positive
from freerun.parsing import EnvArgs
from freerun.persistence.keeper import Interval
from freerun.telemetry.tracking import TrackingConfig

AlgorithmConfig = TypeVar("AlgorithmConfig")
ModeConfig = TypeVar("ModeConfig")
RedAgent = Literal["B_lineAgent", "RedMeanderAgent", "SleepAgent"]
DEFAULT_TOTAL_STEPS = 100_000
SEEDS = 1 << 63
"""What torch and numpy both take."""


@dataclass(frozen=True)
class NoOptions(ModeOptions):
    """For modes that have no settings of their own."""


@dataclass(frozen=True)
class CyberConfig:
    """Cyber-defence environments: freerun/NetworkDefence-v0 and cyborg/CAGE2-v0."""

    red_agent: RedAgent | None = None
    """Who attacks (B_lineAgent if not given)."""
    episode_steps: int | None = None
    """Steps of an episode (100 if not given)."""
    cyborg_path: Path | None = None
    """For cyborg/CAGE2-v0: the folder that holds the CybORG package (if not given: an installed one)."""
    workflow: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Whom to mend first, as defender,enterprise,op_server,op_host,user in any order. Several (the flag may be given
    again) are trained one after another by the same workers."""
    workflows: Path | None = None
    """A file with a workflow in every line."""
    compliance_weight: float | None = None
    """What keeping to the workflow is worth beside the environment's reward (10 if not given)."""

    def __post_init__(self) -> None:
        require_positive(self, "episode_steps")
        if self.workflow and self.workflows is not None:
            raise UserError("give --workflow or --workflows, not both")
        if self.compliance_weight is not None and not (self.workflow or self.workflows):
            raise UserError("--compliance-weight needs a --workflow to comply with")

    def orders(self) -> tuple[str, ...]:
        """The workflows to train."""
        if self.workflows is None:
            return self.workflow
        try:
            lines = self.workflows.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read --workflows {self.workflows}: {error}") from None
        found = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
        if not found:
            raise UserError(f"--workflows {self.workflows} names none: write one in every line")
        return found


@dataclass(frozen=True)
class TrainConfig(Generic[AlgorithmConfig, ModeConfig]):
    env: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENV")]]
    """A Gymnasium id (CartPole-v1, freerun/Straggler-v0, …), your own as module:callable, a task of Isaac Lab
    (Isaac-…), or RSL-RL's as rsl-rl:module:callable; --task ENV says the same."""
    algorithm: tyro.conf.OmitArgPrefixes[AlgorithmConfig]
    collector: tyro.conf.OmitArgPrefixes[ModeConfig]
    cyber: tyro.conf.OmitArgPrefixes[CyberConfig] = field(default_factory=CyberConfig)
    tracking: tyro.conf.OmitArgPrefixes[TrackingConfig] = field(default_factory=TrackingConfig)
    adapting: tyro.conf.OmitArgPrefixes[AdaptConfig] = field(default_factory=AdaptConfig)
    algo: str = "ppo"
    """The learning algorithm; `freerun list` names them. Your own as module:Class (docs/own_algorithm.md)."""
    mode: str = "freerun"
    """The way of collecting; `freerun list` names them. auto: what a probe predicts most of (docs/probe.md). Your own
    as module:Class (docs/own_mode.md)."""
    num_learners: int = 1
    """Learners that update together, on this machine or (with --mode ray) in the cluster: each collects its share and
    works out its share of every gradient. They share --num-workers. docs/learners.md says when that pays, and how to
    start them with torchrun instead."""
    num_workers: int | None = None
    """Worker processes, or auto (one per core if not given; sequential has one worker, this process; continuous has
    --num-collectors and batch has one)."""
    total_steps: int | None = None
    """End the run after so many environment steps (100,000 if neither limit is given)."""
    total_episodes: int | None = None
    """End the run after so many episodes."""
    max_lag: int | None = None
    """How many updates old the weights behind a step may be: with 0 workers wait while the learner updates, with N
    they collect up to N updates ahead (if not given: what suits the algorithm; 0 where collecting and learning take
    turns and with --deterministic)."""
    deterministic: bool = False
    """The same seed gives the same weights, bit for bit, in every mode and with any number of workers (max-lag 0)."""
    seed: int = 0
    """Seeds networks, environments and actions."""
    step_timeout: float = 120.0
    """Seconds without a step or a reset after which a worker is taken for stuck: its stack is shown, it is killed and
    started again, and its episode is run again."""
    max_failures: int = 100
    """How often workers may die, hang or raise in a run, before it ends."""
    on_nan: Literal["continue", "stop"] | None = None
    """What to do about NaN and infinity: stop the run, or keep the episode aside in bad/ and continue without it (if
    not given: continue in continuous and batch, stop in the others)."""
    device: str = "cpu"
    """Where the learner computes: cpu, cuda, cuda:1, … or auto."""
    learner_threads: int = 1
    """Torch threads of the learner; workers need the other cores."""
    env_args: EnvArgs = field(default_factory=dict)
    """Arguments for the environment, as names and values: --env-args mean_seconds 0.005 kind busy."""
    headless: bool = True
    """For Isaac Lab: without a window."""
    max_episode_steps: int | None = None
    """Truncate episodes here (for environments without a time limit of their own)."""
    eval_every: int | None = None
    """Try the policy every so many steps, with its most likely actions; the learner waits meanwhile (off if not
    given)."""
    eval_episodes: int = 5
    """Episodes of such a trial."""
    run_dir: Path | None = None
    """Folder for config, metrics, summary and policy (a new one under runs/ if not given)."""
    checkpoint_every: str = "60s"
    """Keep everything that it takes to resume: a time (60s, 10m, 1h), steps (5000, 50k, 1M) or never. A run that ends
    or is interrupted is kept in any case."""
    keep_checkpoints: int = 3
    """How many of the last checkpoints are kept, beside the best one."""
    display: Literal["auto", "live", "lines", "classic", "rsl-rl"] = "auto"
    """What is shown while a run goes on: a live display, log lines, the lines of the original system, or RSL-RL's block
    (auto: live in a terminal, else lines)."""
    watch: bool = False
    """Show the run on a web page of this machine, as `freerun watch` does; its address is printed."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """No live display, no log lines."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_learners",
            "num_workers",
            "total_steps",
            "total_episodes",
            "max_episode_steps",
            "learner_threads",
            "eval_every",
            "eval_episodes",
            "keep_checkpoints",
        )
        if self.max_lag is not None and self.max_lag < 0:
            raise UserError(f"--max-lag must be 0 or more, not {self.max_lag}")
        if self.step_timeout <= 0:
            raise UserError(f"--step-timeout must be more than 0 seconds, not {self.step_timeout}")
        if self.max_failures < 0:
            raise UserError(f"--max-failures must be 0 or more, not {self.max_failures}")
        Interval.read(self.checkpoint_every)
        if not 0 <= self.seed < SEEDS:
            raise UserError(f"--seed must lie between 0 and {SEEDS - 1}, not {self.seed}")
        if self.deterministic and self.max_lag:
            raise UserError(
                "--deterministic needs --max-lag 0: with lag, which weights chose a step depends on the clock"
            )
        if self.deterministic and self.adapting.adapt:
            raise UserError("--adapt goes by the clock, which --deterministic must not: leave one of them out")
