"""Trains a policy for each task of the gallery, each by one command, and keeps its run: policy, settings, curve, film.

A folder of the gallery is a small run folder, so `freerun eval benchmarks/results/gallery/NAME` plays its policy again.
Exhibits that are not named on the command line stay as they are.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from PIL import Image, ImageSequence
from run_file import RunFile, write_report

import freerun

FILM_WIDTH = 320
"""Pixels. Films of the gallery are smaller than those of `eval --render`, because everybody who clones it gets them."""
FILM_FRAMES = 150
"""A longer film is shortened to every n-th frame."""
KEPT = ("config.json", "policy.safetensors", "summary.json")
"""What is kept of a run folder: enough for `freerun eval` and for `--config`."""
TRIAL_EPISODES = 20


@dataclass(frozen=True)
class Exhibit:
    """A task that one command learns."""

    about: str
    train: tuple[str, ...]
    """What follows `freerun train`."""
    film: tuple[str, ...] = ()
    """What follows `freerun eval … --render`."""
    has_film: bool = True


DRONES = ("--num-envs", "512", "--num-steps-per-env", "24")
EXHIBITS = {
    "cartpole": Exhibit(
        "A cart balances a pole. The best return is 500.",
        ("CartPole-v1", "--num-workers", "4", "--total-steps", "150000"),
    ),
    "lunar_lander": Exhibit(
        "A lander comes down between two flags. It counts as solved at 200.",
        ("LunarLander-v3", "--num-workers", "4", "--total-steps", "600000", "--gamma", "0.999", "--gae-lambda", "0.98"),
    ),
    "half_cheetah": Exhibit(
        "A cheetah of seven bodies runs (MuJoCo).",
        ("HalfCheetah-v5", "--num-workers", "4", "--total-steps", "1000000"),
        has_film=False,
    ),
    "defender": Exhibit(
        "A defender keeps an intruder out of 13 hosts. The best return is 0; `freerun eval --compare` plays others.",
        ("--preset", "defender"),
    ),
    "t_maze": Exhibit(
        "A signal at the entrance of a corridor says which way to turn at its end. With a memory the best return is 1.",
        ("freerun/TMaze-v0", "--memory", "gru", "--total-steps", "80000"),
        has_film=False,
    ),
    "drone_hover": Exhibit(
        "A quadrotor holds its place above rough terrain.",
        ("freerun/RoughDrone-v1", "--env-args", "task", "hover", *DRONES, "--total-steps", "10000000"),
        ("--view", "3d"),
    ),
    "drone_waypoint": Exhibit(
        "The quadrotor flies from one waypoint to the next.",
        ("freerun/RoughDrone-v1", "--env-args", "task", "waypoint", *DRONES, "--total-steps", "20000000"),
        ("--view", "3d"),
    ),
    "drone_explore": Exhibit(
        "The quadrotor sees as much of the terrain as it can. More steps on a GPU explore more.",
        (
            *("freerun/RoughDrone-v1", "--env-args", "task", "explore", *DRONES, "--total-steps", "20000000"),
            *("--gamma", "0.998", "--entropy-coef", "0.005", "--learning-rate", "5e-4"),
        ),
        ("--view", "above"),
    ),
}


@dataclass(frozen=True)
class Options:
    exhibits: tuple[str, ...] = tuple(EXHIBITS)
    """What is trained now; the others stay."""
    seed: int = 0
    output: Path = Path(__file__).parent / "results" / "gallery"
    report_only: bool = False
    """Write the page again, train nothing."""


@dataclass(frozen=True)
class Shown:
    """An exhibit that was trained."""

    name: str
    command: str
    seed: int
    steps: int
    seconds: float
    """Of the whole command."""
    mean_return: float
    """Of fresh episodes with the most likely actions."""


def run(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "freerun", *words], check=True, stdout=subprocess.DEVNULL)


def shrink(film: Path, target: Path) -> None:
    """Write a film as a GIF of few and small frames."""
    with Image.open(film) as opened:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(opened)]
        milliseconds = int(opened.info.get("duration", 40))
    every = -(-len(frames) // FILM_FRAMES)
    height = round(frames[0].height * FILM_WIDTH / frames[0].width)
    small = [frame.resize((FILM_WIDTH, height)).quantize(64) for frame in frames[::every]]
    small[0].save(target, save_all=True, append_images=small[1:], duration=every * milliseconds, loop=0)


def show(name: str, options: Options) -> Shown:
    """Train an exhibit and put what is kept of its run into its folder."""
    exhibit, folder = EXHIBITS[name], options.output / name
    with tempfile.TemporaryDirectory() as scratch:
        run_dir, films = Path(scratch) / "run", Path(scratch) / "films"
        started = time.perf_counter()
        run("train", *exhibit.train, "--seed", str(options.seed), "--run-dir", str(run_dir))
        seconds = time.perf_counter() - started
        policy = freerun.load_policy(run_dir)
        mean_return = freerun.evaluate(policy, episodes=TRIAL_EPISODES).mean
        folder.mkdir(parents=True, exist_ok=True)
        for kept in KEPT:
            shutil.copy(run_dir / kept, folder / kept)
        run("plot", str(run_dir), "-o", str(folder / "curve.png"))
        if exhibit.has_film:
            run("eval", str(run_dir), "--episodes", "1", "--render", str(films), *exhibit.film)
            shrink(next(films.glob("*.gif")), folder / "film.gif")
        steps = json.loads((run_dir / "summary.json").read_text())["env_steps"]
    command = " ".join(("freerun", "train", *exhibit.train))
    return Shown(name, command, options.seed, steps, seconds, mean_return)


def report(shown: list[Shown]) -> str:
    lines = [
        "# Gallery",
        "",
        "`benchmarks/gallery.py` trained these policies, each by the command beside it, one run each. The return is "
        f"the mean of {TRIAL_EPISODES} fresh episodes with the most likely actions. Each folder holds "
        "policy, settings and curve: `freerun eval benchmarks/results/gallery/NAME` plays a policy again, and "
        "`freerun train --config benchmarks/results/gallery/NAME/config.json` trains it again.",
        "",
    ]
    found = {one.name: one for one in shown}
    for name in (name for name in EXHIBITS if name in found):
        one, exhibit = found[name], EXHIBITS[name]
        lines += [f"## {name.replace('_', ' ').capitalize()}", "", exhibit.about, "", "```", one.command, "```", ""]
        lines += [f"Return {one.mean_return:,.1f} after {one.steps:,} steps and {one.seconds:.0f} seconds.", ""]
        pictures = [f"![Learning curve of {name}]({name}/curve.png)"]
        if exhibit.has_film:
            pictures.insert(0, f"![Film of {name}]({name}/film.gif)")
        lines += [" ".join(pictures), ""]
    return "\n".join(lines)


def write_reports(folder: Path) -> str:
    file = RunFile(folder / "gallery.json", Shown)
    return write_report(folder / "gallery.md", report(file.records), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    file = RunFile(options.output / "gallery.json", Shown)
    for name in () if options.report_only else options.exhibits:
        file.replace(show(name, options), "name")
    write_reports(options.output)


if __name__ == "__main__":
    main()
