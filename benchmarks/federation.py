"""Four sites with different attackers: one defender that they learn together, beside each site's own.

Run it in the environment that `make test-federated` makes: build/federated/bin/python benchmarks/federation.py

`pooled` is training on all sites' data, with the settings of the preset: one learner gets the episodes of all four, as
many in each update and in all as the four sites together. The others share their policies after every few updates, as
float16, and keep their critics (`SITE_SETTINGS`, `SHARING`). `own` trains every site alone, with the same settings.
Workers may be one update ahead, as the preset allows. All are judged on fresh episodes of all sites.

Bytes are those that leave or reach the sites: weights and moments of the start, of every round and of the end, or the
observations, actions, rewards, log-probabilities and ends of every step, as freerun's workers send them. (The policies
that go back to the sites of `pooled` are left out.) Finished trainings are
kept, so an interrupted benchmark continues; those that were measured with other sources are run again.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import tyro
from run_file import RunFile, versions, write_report

import freerun
from freerun.algorithms.ppo.ppo import PPO
from freerun.algorithms.ppo.ppo_config import PPOConfig
from freerun.core import FloatArray
from freerun.settings.presets import settings_of
from freerun.settings.registry import make_config
from freerun.tools.federation.federation import federate
from freerun.tools.federation.federation_options import FederationOptions, Strategy
from freerun_envs.network_defence import NetworkDefenceVector
from freerun_envs.single_network import NetworkDefence

SITES: dict[str, dict[str, Any]] = {
    "b-line": {"red_agent": "B_lineAgent"},
    "meander": {"red_agent": "RedMeanderAgent"},
    "b-line-50": {"red_agent": "B_lineAgent", "episode_steps": 50},
    "meander-50": {"red_agent": "RedMeanderAgent", "episode_steps": 50},
}
STRATEGIES = get_args(Strategy)
HIDDEN_SIZES = (64, 64)
EPISODES_PER_UPDATE, MINIBATCH_SIZE = 40, 500
"""Of `pooled`, as in the preset."""
SITE_SETTINGS = {
    "episodes_per_update": EPISODES_PER_UPDATE // 4,
    "minibatch_size": MINIBATCH_SIZE // 4,
    "learning_rate": 4e-3,
}
"""Of each site: its part of an update of `pooled`, and of a minibatch, so that it takes as many gradient steps. Smaller
minibatches are noisier, which makes Adam's steps in the common direction of all sites smaller: hence twice the preset's
learning rate. All was chosen on seeds from 100 on, which are not reported (docs/federated.md)."""
SHARING: dict[str, Any] = {"updates_per_round": 5, "share": "policy", "send_as": "float16"}
OF_STRATEGY: dict[str, dict[str, Any]] = {"fedavgm": {"server_step": 1.5}}
"""What only one strategy has. The others have the defaults of `FederationOptions`."""
SENT = ("obs", "action", "reward", "log_prob", "terminated", "truncated")
"""What PPO needs of a step from whoever collected it."""


@dataclass(frozen=True)
class Options:
    episodes: int = 4000
    """Episodes of each site. With half as many, two runs of the same settings differ by up to six points."""
    seeds: tuple[int, ...] = (0, 1)
    systems: tuple[str, ...] = ("own", "pooled", *STRATEGIES)
    again: bool = False
    """Run again what was run before, and replace it."""
    num_workers: int = 1
    """Workers of each training."""
    eval_episodes: int = 400
    """Fresh episodes on each site by which a policy is judged."""
    output: Path = Path(__file__).parent / "results" / "federation"


@dataclass(frozen=True)
class Trained:
    """A defender, and how it did."""

    system: str
    seed: int
    scores: dict[str, float]
    """The mean return on each site."""
    num_bytes: int
    wall_seconds: float
    versions: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    """What `own` and federated sites have other than the preset, and how they share (`recorded`)."""
    episodes: int = 2000
    """Episodes of each site."""

    def is_of(self, system: str, episodes: int) -> bool:
        """Whether this is a run of a system for that many episodes, with its settings of now."""
        is_same_work = self.episodes == episodes and self.settings == recorded(system)
        return self.system.partition(":")[0] == system and is_same_work

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores.values())

    @property
    def row(self) -> str:
        """The name of its row: runs with other settings than those of now say in what they differ."""
        now = recorded(self.system)
        names = [name for name in {**now, **self.settings} if self.settings.get(name) != now.get(name)]
        others = [f"{name} {self.settings.get(name, 'of the preset')}" for name in names]
        others += [f"{self.episodes:,} episodes"] if self.episodes != Options.episodes else []
        return f"{self.system} ({', '.join(others)})" if others else self.system


class AllSites(NetworkDefence):
    """The environments of all sites in one: the seed of an episode decides whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self._envs = [NetworkDefence(**arguments) for arguments in SITES.values()]
        self._env = self._envs[0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[FloatArray, dict[str, Any]]:
        assert seed is not None
        self._env = self._envs[seed % len(self._envs)]
        return self._env.reset(seed=seed)

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        return self._env.step(action)


class MeasuredPPO(PPO):
    """PPO that counts the bytes of the steps that it is given."""

    Config = PPOConfig
    num_bytes = 0

    def observe(self, segments: Sequence[Any]) -> None:
        MeasuredPPO.num_bytes += sum(getattr(segment, name).nbytes for segment in segments for name in SENT)
        super().observe(segments)


def settings(options: Options, seed: int, episodes: int) -> dict[str, Any]:
    sizes = {"hidden_sizes": HIDDEN_SIZES, "episodes_per_update": EPISODES_PER_UPDATE, "minibatch_size": MINIBATCH_SIZE}
    own = {"total_episodes": episodes, "seed": seed, "num_workers": options.num_workers, "quiet": True}
    return {**settings_of(["defender"]), **sizes, **own}


def recorded(system: str) -> dict[str, Any]:
    """Return the settings that are kept with a run: a run with others than those of now is another row of the table."""
    if system in STRATEGIES:
        return {**SITE_SETTINGS, **SHARING, **OF_STRATEGY.get(system, {})}
    return dict(SITE_SETTINGS) if system.partition(":")[0] == "own" else {}


def judge(run_dir: Path, num_episodes: int) -> dict[str, float]:
    """The mean return of a policy on each site, on episodes that nobody was trained on."""
    policy = freerun.load_policy(run_dir)
    scores = {}
    for name, site in SITES.items():
        networks = NetworkDefenceVector(num_episodes, site["red_agent"], site.get("episode_steps", 100))
        obs = networks.reset([2**62 + number for number in range(num_episodes)])
        total = np.zeros(num_episodes)
        for _ in range(site.get("episode_steps", 100)):
            obs, _, reward, _, _ = networks.step(policy.predict(obs))
            total += reward
        scores[name] = float(total.mean())
    return scores


def finished(result: Any) -> Path:
    """Return the run folder of a training, unless it was interrupted: half a training must not count."""
    if result.summary["outcome"] != "finished":
        raise SystemExit(f"a training was {result.summary['outcome']}: it is not kept")
    return Path(result.run_dir)


def train(system: str, seed: int, options: Options, folder: Path) -> list[Trained]:
    began = time.perf_counter()
    if system == "own":
        found = []
        for number, (name, site) in enumerate(SITES.items()):
            config = {**settings(options, seed * len(SITES) + number, options.episodes), **SITE_SETTINGS, **site}
            found.append((f"{system}: {name}", finished(freerun.train(**config, run_dir=folder / name)), 0))
    elif system == "pooled":
        config = settings(options, seed, len(SITES) * options.episodes)
        MeasuredPPO.num_bytes = 0
        run_dir = finished(freerun.train(**{**config, "env": AllSites, "algo": MeasuredPPO}, run_dir=folder / "run"))
        found = [(system, run_dir, MeasuredPPO.num_bytes)]
    else:
        federation = FederationOptions(
            rounds=options.episodes // (SITE_SETTINGS["episodes_per_update"] * SHARING["updates_per_round"]),
            strategy=system,  # type: ignore[arg-type]
            **SHARING,
            **OF_STRATEGY.get(system, {}),
        )
        sites = {
            name: make_config(
                {**settings(options, seed * len(SITES) + number, options.episodes), **SITE_SETTINGS, **site}
            )
            for number, (name, site) in enumerate(SITES.items())
        }
        result = federate(sites, federation, folder / "federation")
        of_rounds = [figures["bytes_up"] + figures["bytes_down"] for figures in result.rounds]
        # Before the first round, all sites say what they begin with; after the last one, all get what was learned.
        found = [(system, next(iter(result.run_dirs.values())), sum(of_rounds) + of_rounds[-1])]
    seconds = time.perf_counter() - began
    return [
        Trained(
            system=name,
            seed=seed,
            scores=judge(run_dir, options.eval_episodes),
            num_bytes=num_bytes,
            wall_seconds=seconds,
            versions=versions(),
            settings=recorded(system),
            episodes=options.episodes,
        )
        for name, run_dir, num_bytes in found
    ]


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = RunFile(options.output / "federation.json", Trained)
    for seed in options.seeds:
        for system in options.systems:
            before = [run for run in file.records if run.seed == seed and run.is_of(system, options.episodes)]
            if before and all(map(file.is_current, before)) and not options.again:
                continue
            folder = Path(tempfile.mkdtemp(prefix="federation-"))
            found = train(system, seed, options, folder)
            file.records = [run for run in file.records if run not in before] + found
            file.save()
            shutil.rmtree(folder)
            last = file.records[-1]
            print(f"{last.system}, seed {seed}: {last.scores}, {last.num_bytes:,} bytes", flush=True)
    print(write_reports(options.output))


def difference(means: Sequence[float], others: Sequence[float]) -> str:
    """Say how far the mean of some seeds lies above that of others, with the standard error of the difference."""
    if min(len(means), len(others)) < 2:
        return "–"
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (means, others)))
    return f"{statistics.fmean(means) - statistics.fmean(others):+.2f} ± {error:.2f}"


def write_reports(folder: Path) -> str:
    file = RunFile(folder / "federation.json", Trained)
    return write_report(folder / "federation.md", markdown(file.records, Options()), file.stamped())


def markdown(runs: Sequence[Trained], options: Options) -> str:
    rows = list(dict.fromkeys(run.row for run in runs))
    lines = [
        "# One defender of four networks, by federated learning",
        "",
        f"Mean returns on {options.eval_episodes} fresh episodes of each site, and their mean over seeds; up to "
        f"{options.episodes:,} episodes of training per site, or as many as the row says. *Above `pooled`* is the "
        "difference of the means, and its standard error over seeds; *of `pooled`* compares the bytes. Both compare "
        "with as many episodes. `benchmarks/federation.py` says what the rows are, and wrote this.",
        "",
        "| defender | seeds | "
        + " | ".join(f"{name}" for name in SITES)
        + " | mean | lowest–highest | above `pooled` | MB | of `pooled` |",
        "| --- |" + " ---: |" * (len(SITES) + 6),
    ]
    for row in rows:
        found = [run for run in runs if run.row == row]
        pooled = [run for run in runs if run.system == "pooled" and run.episodes == found[0].episodes]
        scores = {name: statistics.fmean(run.scores[name] for run in found) for name in SITES}
        means = [run.mean for run in found]
        num_bytes = statistics.fmean(run.num_bytes for run in found)
        of_pooled = statistics.fmean(run.num_bytes for run in pooled) if pooled else 0.0
        share = f"{100 * num_bytes / of_pooled:.1f} %" if num_bytes and of_pooled else "–"
        above = "–" if found[0].system == "pooled" else difference(means, [run.mean for run in pooled])
        cells = [f"{score:.2f}" for score in scores.values()]
        spread = f"{min(means):.2f}–{max(means):.2f}"
        lines.append(
            f"| {row} | {len(found)} | {' | '.join(cells)} | {statistics.fmean(means):.2f} | {spread} | "
            f"{above} | {num_bytes / 1e6:.2f} | {share} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
