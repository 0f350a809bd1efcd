"""The settings of a run. They are the flags of `freerun train`, the keys of config.json and the arguments of
`freerun.train()`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import tyro

from freerun.core import Common, EnvSettings, UserError, require_positive
from freerun.persistence.checkpoint_sink import Interval
from freerun.settings.flag_parsing import EnvArgs
from freerun.telemetry.tracking import TrackingConfig

AlgorithmConfig = TypeVar("AlgorithmConfig")
ModeConfig = TypeVar("ModeConfig")
DEFAULT_TOTAL_STEPS = 100_000
NUM_SEEDS = 1 << 63
"""The seeds that both torch and numpy take."""


@dataclass(frozen=True)
class AdaptConfig:
    """Self-tuning during a run (docs/adapting.md)."""

    adapt: bool = False
    """Change the number of workers, environments per worker, queue and batches during the run, for more steps per
    second. A change that does not help is undone. adapting.jsonl lists every change."""
    adapt_max_workers: int | None = None
    """The largest number of workers or collectors (if not given: 32 per core, at most 256, and as many as fit into
    memory)."""
    adapt_max_envs_per_worker: int | None = None
    """The largest number of environments per worker, in --mode freerun without --segment-steps (if not given: 8)."""
    adapt_max_queue_size: int | None = None
    """The longest queue, in --mode continuous and batch (if not given: the configured one, and at least 64)."""
    adapt_max_minibatch: int | None = None
    """Let minibatches grow up to this size. It changes what is learned, so they do not grow if it is not given."""
    adapt_min_update_ratio: float | None = None
    """Let epochs (PPO) or updates per step (SAC, MBPO) fall to this number. They do not fall if it is not given."""
    adapt_window: float = 3.0
    """The least number of seconds over which the speed is measured before and after a change."""

    def __post_init__(self) -> None:
        # A bound without --adapt is a mistake, because it would do nothing.
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        if not self.adapt and given:
            raise UserError(f"--{given[0].replace('_', '-')} is a bound of --adapt: give that too")
        require_positive(
            self, "adapt_max_workers", "adapt_max_envs_per_worker", "adapt_max_queue_size", "adapt_max_minibatch"
        )
        for name in ("adapt_min_update_ratio", "adapt_window"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")


@dataclass(frozen=True)
class TrainConfig(Generic[AlgorithmConfig, ModeConfig]):
    """All settings of a run. The parts below have no names of their own for users, who see one flat list."""

    env: Common[tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENV")]]]
    """A Gymnasium id (CartPole-v1, freerun/Straggler-v0, …), your own as module:callable, a task of Isaac Lab
    (Isaac-…), or RSL-RL's as rsl-rl:module:callable. --task ENV is another way to name it."""
    # The classes of these two depend on --algo and --mode, that of env_settings on the environment.
    algorithm: tyro.conf.OmitArgPrefixes[AlgorithmConfig]
    collector: tyro.conf.OmitArgPrefixes[ModeConfig]
    env_settings: tyro.conf.OmitArgPrefixes[EnvSettings] = field(default_factory=EnvSettings)
    tracking: tyro.conf.OmitArgPrefixes[TrackingConfig] = field(default_factory=TrackingConfig)
    adapting: tyro.conf.OmitArgPrefixes[AdaptConfig] = field(default_factory=AdaptConfig)
    algo: Common[str] = "ppo"
    """The learning algorithm: one that `freerun list` names, or your own as module:Class (docs/own_algorithm.md)."""
    mode: Common[str] = "freerun"
    """The way of collecting: one that `freerun list` names, or your own as module:Class (docs/own_mode.md). auto takes
    the mode for which a probe predicts the most steps per second (docs/probe.md). If not given: freerun, and batch for
    environments that are tensors."""
    num_learners: int = 1
    """Learners that update together, on this machine or (with --mode ray) in the cluster. Each collects its share of
    the data and computes its share of every gradient; they share --num-workers. docs/learners.md says when that pays,
    and how to start them with torchrun instead."""
    num_workers: Common[int | None] = None
    """Worker processes, or auto (one per core if not given). Sequential has one worker, this process; continuous has
    --num-collectors; batch has one."""
    total_steps: Common[int | None] = None
    """End the run after this number of environment steps (100,000 if neither limit is given)."""
    total_episodes: Common[int | None] = None
    """End the run after this number of episodes."""
    max_lag: Common[int | None] = None
    """How many updates old the weights that choose an action may be. With 0, workers wait while the learner updates;
    with N, they collect up to N updates ahead. If not given: what suits the algorithm, and 0 with --deterministic or if
    collecting and learning take turns."""
    deterministic: Common[bool] = False
    """The same seed gives the same weights, bit for bit, in every mode and with any number of workers (--max-lag 0)."""
    seed: Common[int] = 0
    """The seed of networks, environments and actions."""
    step_timeout: float = 120.0
    """Seconds without a step or a reset after which a worker counts as stuck. Its stack is shown, it is killed and
    restarted, and its episode is run again."""
    max_failures: int = 100
    """How often workers may die, hang or raise an exception before the run ends."""
    on_nan: Literal["continue", "stop"] | None = None
    """What to do about NaN and infinity: stop the run, or save the episode in bad/ and continue without it (if not
    given: continue in the modes continuous and batch, stop in the others)."""
    device: Common[str] = "cpu"
    """Where the learner computes: cpu, cuda, cuda:1, … or auto, which tries both for a second and takes the faster."""
    learner_threads: int | Literal["auto"] = "auto"
    """Threads of the learner, or auto: more on cores that the workers leave idle, as long as they make updates faster.
    numpy keeps to one then, and torch with --deterministic. The number changes no result of PPO's compiled learner."""
    env_args: Common[EnvArgs] = field(default_factory=dict)
    """Arguments for the environment, as names and values: --env-args mean_seconds 0.005 kind busy, or the same with
    equals signs: --env-args mean_seconds=0.005 kind=busy."""
    wrap: Literal["atari"] | None = None
    """Wrap each environment: atari gives 84 × 84 grey pixels, an action every four frames, and the newest four
    observations (ALE/Pong-v5 and others, freerun[atari]; docs/images.md)."""
    headless: bool = True
    """For Isaac Lab: run the simulator without a window."""
    max_episode_steps: Common[int | None] = None
    """Truncate episodes after this number of steps, in environments without a time limit of their own."""
    eval_every: Common[int | None] = None
    """Evaluate the policy whenever this many steps were made, with its most likely actions. The learner waits meanwhile
    (off if not given)."""
    eval_episodes: int = 5
    """Episodes of each evaluation of --eval-every."""
    callback: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Call your own code after every update: module:Class with a method on_update (docs/callbacks.md; the flag may be
    given again)."""
    run_dir: Common[Path | None] = None
    """Folder for settings, metrics, checkpoints and policy (a new one under runs/ if not given)."""
    init_from: Common[Annotated[Path | None, tyro.conf.arg(metavar="RUN_DIR")]] = None
    """Start a new run with the networks and normalisers of another run: those of its newest checkpoint, or of the
    checkpoint that is named (RUN_DIR/checkpoints/update-…). Counters, replay buffers and randomness start anew."""
    init_optimizer: bool = False
    """With --init-from: also take over the state of the optimisers. Learning rates are those of the new run."""
    checkpoint_every: str = "60s"
    """How often to write a checkpoint: a time (60s, 10m, 1h), steps (5000, 50k, 1M) or never. A run that ends or is
    interrupted always writes one."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints are kept, besides the best one."""
    display: Literal["auto", "live", "lines", "classic", "rsl-rl"] = "auto"
    """What is shown during the run: a live display, log lines, the lines of the original system, or RSL-RL's block
    (auto: live in a terminal, lines otherwise)."""
    watch: Common[bool] = False
    """Show the run on a web page of this machine, as `freerun watch` does, and print its address."""
    quiet: Common[Annotated[bool, tyro.conf.arg(aliases=["-q"])]] = False
    """Show no live display and no log lines."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_learners",
            "num_workers",
            "total_steps",
            "total_episodes",
            "max_episode_steps",
            "eval_every",
            "eval_episodes",
            "keep_checkpoints",
        )
        if self.learner_threads != "auto":
            require_positive(self, "learner_threads")
        if self.max_lag is not None and self.max_lag < 0:
            raise UserError(f"--max-lag must be 0 or more, not {self.max_lag}")
        if self.step_timeout <= 0:
            raise UserError(f"--step-timeout must be more than 0 seconds, not {self.step_timeout}")
        if self.max_failures < 0:
            raise UserError(f"--max-failures must be 0 or more, not {self.max_failures}")
        # It raises if the text is no interval.
        Interval.read(self.checkpoint_every)
        if not 0 <= self.seed < NUM_SEEDS:
            raise UserError(f"--seed must lie between 0 and {NUM_SEEDS - 1}, not {self.seed}")
        if self.init_optimizer and self.init_from is None:
            raise UserError("--init-optimizer needs a run to take the optimiser from: give --init-from RUN_DIR")
        if self.deterministic and self.max_lag:
            raise UserError(
                "--deterministic needs --max-lag 0: with lag, which weights chose a step depends on the clock"
            )
        if self.deterministic and self.adapting.adapt:
            raise UserError("--adapt decides by the clock, which --deterministic must not: leave one of them out")


AnyConfig = TrainConfig[Any, Any]
"""The settings of a run, whatever its algorithm and its mode."""


class HelpGroup(NamedTuple):
    """Settings that `--help` and `--help-all` show together."""

    about: str
    settings: tuple[str, ...]
    """Names of settings of `TrainConfig`. The name of a part, such as `algorithm`, stands for all of its settings, and
    `start` for the flags that choose what a run starts from."""


HELP_GROUPS = {
    "start": HelpGroup(
        "What the run starts from. Flags override what a file or a preset says.",
        ("start", "init_from", "init_optimizer"),
    ),
    "environment": HelpGroup(
        "What is learned.", ("env", "env_args", "wrap", "max_episode_steps", "headless", "env_settings")
    ),
    "algorithm": HelpGroup("How it is learned.", ("algo", "algorithm", "device", "learner_threads", "num_learners")),
    "workers": HelpGroup(
        "How steps are collected.",
        (
            "mode",
            "num_workers",
            "collector",
            "max_lag",
            "deterministic",
            "step_timeout",
            "max_failures",
            "on_nan",
            "adapting",
        ),
    ),
    "length": HelpGroup(
        "How long the run takes, and how it is judged meanwhile.",
        ("total_steps", "total_episodes", "seed", "eval_every", "eval_episodes", "callback"),
    ),
    "output": HelpGroup(
        "What is kept and shown.",
        ("run_dir", "checkpoint_every", "keep_checkpoints", "display", "watch", "quiet", "tracking"),
    ),
}
