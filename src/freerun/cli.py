"""The command line: `freerun train | probe | bench | eval | replay | watch | plot | list | check-env`."""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from freerun.core import EnvFailure, LearnerFailure, UserError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a failure of the environment or of another learner, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        _print_help()
        return 0 if words else 2
    if words[0] == "--version":
        from freerun import __version__

        print(__version__)
        return 0
    exit_code = _run(words)
    if launcher := sys.modules.get("freerun.envs.isaac_launch"):
        launcher.stop(exit_code)
    return exit_code


def _run(words: list[str]) -> int:
    try:
        if words[0] not in COMMANDS:
            raise UserError(f"there is no command {words[0]!r}: use {', '.join(COMMANDS)}")
        return COMMANDS[words[0]](words[1:])
    except UserError as error:
        print(f"freerun: {error}", file=sys.stderr)
        return 2
    except (EnvFailure, LearnerFailure) as failure:
        print(f"freerun: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_help() -> None:
    console = Console()
    console.print("[bold]freerun[/bold] trains agents without making fast workers wait for slow ones.\n")
    table = Table.grid(padding=(0, 3))
    for name, command in COMMANDS.items():
        table.add_row(f"  freerun {name}", (command.__doc__ or "").splitlines()[0])
    console.print(table)
    console.print("\nStart with: [cyan]freerun train CartPole-v1[/cyan]. Each command explains itself with --help.")


# ---------------------------------------------------------------------------------------------- train


@dataclass(frozen=True)
class _Simulator:
    """What must be known before anything is imported."""

    task: str | None = None
    device: str = "cpu"
    headless: bool = True
    resume: Path | None = None


def _start_simulator(words: list[str]) -> str | None:
    """Isaac Sim comes first, if it is to come at all; what was named as --task, or as ENV if that is a simulator's."""
    from freerun.envs.isaac_launch import is_isaac_task, start_app
    from freerun.envs.tensors import is_only_tensors

    simulator, _ = tyro.cli(_Simulator, args=words, return_unknown_args=True, add_help=False)
    task = simulator.task or next(filter(is_only_tensors, words), None)
    if is_isaac_task(task):
        start_app(simulator.device, simulator.headless)
    elif simulator.resume is not None:
        _start_simulator_of(simulator.resume)
    return task


def _start_simulator_of(run_dir: Path) -> None:
    """The same for a run that is there already, or for one of its checkpoints."""
    from freerun.envs.isaac_launch import is_isaac_task, start_app
    from freerun.persistence.files import read_json

    for folder in (run_dir, *list(run_dir.parents)[:2]):
        if (folder / "config.json").is_file():
            config = read_json(folder / "config.json")
            if is_isaac_task(config.get("env")):
                start_app(config.get("device", _Simulator.device), config.get("headless", _Simulator.headless))
            return


def train(words: list[str]) -> int:
    """Train an agent on an environment."""
    task = _start_simulator(words)
    from freerun import experiment, learners
    from freerun.flags import Flags
    from freerun.probing import auto

    # Pre-emptible machines and `timeout` send SIGTERM: it ends a run as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not learners.is_first():  # torchrun sends signals to all: the others end with the first
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    flags = Flags.read(words, task)
    config = auto.settle(flags.options, flags.config) if flags.is_open else flags.config()
    if len(config.cyber.orders()) > 1 or (flags.resumes and flags.resumed is None):
        return _train_workflows(config)
    result = experiment.run(config, resumed=flags.resumed)
    summary = result.summary
    if not learners.is_first():
        return INTERRUPTED if summary["outcome"] == "interrupted" else 0
    print(
        f"{summary['outcome'].capitalize()}: {summary['env_steps']:,} steps, "
        f"{summary['episodes']:,} episodes, {summary['updates']} updates in {summary['wall_seconds']:.1f} s "
        f"({summary['steps_per_second']:,.0f} steps/s, {summary['episodes_per_second']:,.1f} episodes/s); "
        f"mean return {'-' if summary['mean_return'] is None else format(summary['mean_return'], '.2f')}\n"
        f"Run folder: {result.run_dir}  (freerun eval {result.run_dir})"
    )
    if not config.quiet:
        _print_timeline(result.run_dir, summary["advice"])
    if result.page is not None and sys.stdin.isatty() and summary["outcome"] == "finished":
        _show_on(result.page, result.run_dir)
    if not result.is_kept:
        print("freerun: not everything could be written to the run folder, see above", file=sys.stderr)
    return INTERRUPTED if summary["outcome"] == "interrupted" else 0 if result.is_kept else 1


def _show_on(address: str, run_dir: Path) -> None:
    """The page goes on, at the same address, as long as the user wants."""
    from urllib.parse import parse_qs, urlsplit

    from freerun.watch.server import serve

    parts = urlsplit(address)
    print(f"The page stays at {address} until Ctrl-C.")
    serve([run_dir], port=parts.port, token=parse_qs(parts.query)["token"][0], announce=lambda url: None)


def _print_timeline(run_dir: Path, advice: str | None) -> None:
    from freerun.telemetry.chart import chart
    from freerun.telemetry.timeline import Recording

    recording = Recording.of(run_dir)
    if recording is not None:
        console = Console(stderr=True)
        console = console if console.is_terminal else Console(stderr=True, width=160)
        console.print(chart(recording, console.width))
        if advice:
            console.print(f"Advice: {advice}", highlight=False, markup=False)


def _train_workflows(config: Any) -> int:
    from freerun.series import run_workflows

    results = run_workflows(config)
    if not results:
        print("All workflows were trained before.")
        return 0
    print(f"Run folders: {results[0].run_dir.parent}")
    return INTERRUPTED if results[-1].summary["outcome"] == "interrupted" else 0


# ---------------------------------------------------------------------------------------------- probe


@dataclass(frozen=True)
class _Probe:
    json: bool = False
    """Print everything as JSON."""
    workers: str | None = None
    """Numbers of workers to predict for, such as 1,10,100 (those that are worth a thought if not given)."""


def probe(words: list[str]) -> int:
    """Measure an environment and this machine, and predict how fast each mode would train."""
    if not words or {"-h", "--help"} & set(words):
        print(f"usage: freerun probe ENV [--json] [--workers 1,10,100] [any flag of freerun train]\n\n{probe.__doc__}")
        return 0 if words else 2
    options, rest = tyro.cli(_Probe, args=words, return_unknown_args=True, add_help=False)
    from freerun.flags import Flags
    from freerun.probing import auto, report
    from freerun.registry import ALIASES

    try:
        counts = sorted({int(word) for word in options.workers.split(",")}) if options.workers else []
    except ValueError:
        raise UserError(f"--workers takes numbers such as 1,10,100, not {options.workers!r}") from None
    if counts and counts[0] < 1:
        raise UserError(f"--workers must be at least 1, not {counts[0]}")
    flags = Flags.read(rest, None)
    given = flags.options.get("mode", auto.AUTO)
    modes = auto.ALL if given == auto.AUTO else [ALIASES.get(given, given)]
    with Console(stderr=True).status("probing") as status:
        found, configs = auto.look(
            modes, flags.config, fresh=True, say=lambda doing: status.update(f"probing: {doing}"), counts=counts
        )
    config = configs[found.best.mode]
    if options.json:
        print(report.to_json(found, config, rest))
    else:
        console = Console()
        report.print_report(found, config, console if console.is_terminal else Console(width=140), rest)
    return 0


# ---------------------------------------------------------------------------------------------- eval


@dataclass(frozen=True)
class _Eval:
    run_dir: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN_DIR")]]
    """Folder of a run, or of one of its checkpoints."""
    checkpoint: str | None = None
    """Of a run folder: best, newest, or the name of one (if not given: the policy that the run ended with)."""
    episodes: int = 10
    """How many episodes."""
    render: Path | None = None
    """Film each episode as a GIF in this folder."""
    seed: int | None = None
    """Seed of the episodes (derived from the run's seed if not given)."""
    compare: bool = False
    """For cyber defence: beside defenders that sleep, act at random, or restore on sight."""
    sample: bool = False
    """Sample actions as in training, instead of taking the most likely ones."""
    trust: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Code that a folder from elsewhere names (module:callable), if it may run (the flag may be given again)."""


def evaluate(words: list[str]) -> int:
    """Run a trained policy on fresh episodes."""
    options = tyro.cli(_Eval, args=words, prog="freerun eval", description=evaluate.__doc__)
    _start_simulator_of(options.run_dir)
    from freerun import evaluation

    if options.compare:
        _print_comparison(
            evaluation.compare(options.run_dir, options.episodes, options.seed, options.checkpoint, options.trust)
        )
        return 0
    result = evaluation.evaluate(
        options.run_dir,
        options.episodes,
        options.seed,
        not options.sample,
        options.render,
        options.checkpoint,
        options.trust,
    )
    print(result)
    for path in result.pictures:
        print(path)
    return 0


def _print_comparison(evaluations: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("defender")
    table.add_column("mean return", justify="right")
    table.add_column("deviation", justify="right")
    for name, found in sorted(evaluations.items(), key=lambda item: -statistics.mean(item[1].returns)):
        deviation = statistics.stdev(found.returns) if len(found.returns) > 1 else 0.0
        style = "bold green" if name == "trained" else None
        table.add_row(name, f"{statistics.mean(found.returns):.1f}", f"{deviation:.1f}", style=style)
    Console().print(table)


# ---------------------------------------------------------------------------------------------- replay


@dataclass(frozen=True)
class _Replay:
    run_dir: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN_DIR")]]
    """Folder of a run."""
    until_update: int | None = None
    """Stop in a debugger before this update."""
    trust: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Code that a folder from elsewhere names (module:callable), if it may run (the flag may be given again)."""


def replay(words: list[str]) -> int:
    """Re-enact a run in one process, from its ledger: the same steps, the same updates, the same weights."""
    options = tyro.cli(_Replay, args=words, prog="freerun replay", description=replay.__doc__)
    from freerun.replaying import replay as again

    found = again(options.run_dir, options.until_update, options.trust)
    print(found)
    return 0 if found.is_same else 1


# ---------------------------------------------------------------------------------------------- watch


@dataclass(frozen=True)
class _Watch:
    paths: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN_DIR")]] = (Path("runs"),)
    """Runs, or folders of runs; nothing else can be seen through the page."""
    host: str = "127.0.0.1"
    """Address to listen on. Other machines can look only at one that is not a loopback; that needs a --token."""
    port: int | None = None
    """Port to listen on (8642 if not given, or another if that is taken)."""
    token: str | None = None
    """What the page's address must contain (a new one each time if not given). FREERUN_WATCH_TOKEN says it too, and is
    not seen in the list of processes."""
    selected: str | None = None
    """The run that is shown first (the newest if not given)."""
    until_input_ends: bool = False
    """End when standard input does: for programs that start this one."""


def watch(words: list[str]) -> int:
    """Show runs on a local web page, live or afterwards."""
    options = tyro.cli(_Watch, args=words, prog="freerun watch", description=watch.__doc__)
    from freerun.watch.server import end_with_input, serve

    for path in options.paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}: name a run folder, or a folder of runs")
    if options.until_input_ends:
        end_with_input()
    token = options.token or os.environ.get("FREERUN_WATCH_TOKEN")
    serve(options.paths, options.host, options.port, token, options.selected, lambda url: print(url, flush=True))
    return 0


# ---------------------------------------------------------------------------------------------- bench


@dataclass(frozen=True)
class _FirstOfBench:
    """What must be known before the other flags: an earlier bench has its own settings."""

    resume: Path | None = None


def bench(words: list[str]) -> int:
    """Measure every way of collecting on an environment, and compare them with the limit of the machine."""
    from freerun.benching.command import bench as run_bench
    from freerun.benching.command import resumed_options
    from freerun.benching.options import BenchOptions
    from freerun.benching.text import print_results

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    first, rest = tyro.cli(_FirstOfBench, args=words, return_unknown_args=True, add_help=False)
    default, earlier = (None, None) if first.resume is None else resumed_options(first.resume)
    options: BenchOptions = tyro.cli(
        BenchOptions,
        args=rest,
        prog="freerun bench",
        description=f"{bench.__doc__} --resume FOLDER goes on with a bench that was stopped; with more --repeats, "
        "--modes or --workers it measures more.",
        # A dictionary that is not empty would become a flag for each of its names.
        default=tyro.MISSING_NONPROP if default is None else dataclasses.replace(default, env_args={}),
    )
    if default is not None and not options.env_args:
        options = dataclasses.replace(options, env_args=default.env_args)
    results, folder = run_bench(options, lambda line: print(line, file=sys.stderr, flush=True), earlier)
    console = Console()
    print_results(results, console if console.is_terminal else Console(width=160))
    print(f"Report: {folder / 'report.html'} (and report.md, report.json)")
    if results.outcome != "finished":
        print(f"Measure the rest: freerun bench --resume {folder}")
    return INTERRUPTED if results.outcome == "interrupted" else 0


# ---------------------------------------------------------------------------------------------- plot


@dataclass(frozen=True)
class _Plot:
    paths: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN_DIR")]]
    """Runs, or folders of runs. Those that differ only in their seed are one learning curve."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The file to write: .png, .svg or .pdf, or .html to zoom in."""
    what: Literal["curves", "timeline", "scaling"] = "curves"
    """Learning curves (interquartile mean over seeds and its 95 % confidence interval), who was busy when, or steps per
    second by the number of workers."""
    metric: str = "return_mean"
    """For curves: any of metrics.jsonl."""
    x: str = "step"
    """For curves: what is on the other axis, such as wall_seconds."""


def plot(words: list[str]) -> int:
    """Draw learning curves, timelines or scaling of runs."""
    options = tyro.cli(_Plot, args=words, prog="freerun plot", description=plot.__doc__)
    from freerun.plots import drawing, learning, panels

    runs = panels.find_runs(options.paths)
    if options.what == "curves":
        drawn = learning.curves(runs, options.metric, options.x)
    else:
        drawn = panels.timelines(runs) if options.what == "timeline" else panels.scaling(runs)
    drawing.draw(drawn, options.output)
    print(options.output)
    return 0


# ---------------------------------------------------------------------------------------------- list, check-env


@dataclass(frozen=True)
class _List:
    """Name what is there: environments, algorithms, modes."""


def list_names(words: list[str]) -> int:
    """Name what is there: environments, algorithms, modes."""
    tyro.cli(_List, args=words, prog="freerun list")
    from freerun import envs, presets, registry

    console = Console(markup=False)  # freerun[box2d] is no markup
    for title, names in (
        ("Environments", {**{name: about for name, (_, about) in envs.BUILT_IN.items()}, **envs.OTHERS}),
        ("Algorithms (--algo)", {name: entry.about for name, entry in registry.ALGORITHMS.items()}),
        ("Modes (--mode)", _modes()),
        ("Trackers (--track)", {name: entry.about for name, entry in registry.TRACKERS.items()}),
        ("Presets (--preset)", {name: preset.about for name, preset in presets.PRESETS.items()}),
    ):
        table = Table.grid(padding=(0, 2))
        for name, about in names.items():
            table.add_row(f"  {name}", about)
        console.print(title, style="bold")
        console.print(table)
    return 0


def _modes() -> dict[str, str]:
    from freerun.registry import MODES

    about_auto = "measures the environment and this machine, and chooses (`freerun probe` shows how)"
    return {**{name: entry.about for name, entry in MODES.items()}, "auto": about_auto}


@dataclass(frozen=True)
class _CheckEnv:
    env: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENV")]]
    """A Gymnasium id or your own as module:callable."""
    episodes: int = 3
    """Episodes to try, with random actions."""
    env_args: dict[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    """Arguments for the environment, as names and values."""


def check_env(words: list[str]) -> int:
    """Look for what is wrong with an environment, and say how to mend it."""
    options = tyro.cli(_CheckEnv, args=words, prog="freerun check-env", description=check_env.__doc__)
    from freerun.envs.check import check, print_report

    findings = check(options.env, options.env_args, options.episodes)
    print_report(options.env, findings, Console())
    return 0 if all(finding.good for finding in findings) else 1


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "probe": probe,
    "eval": evaluate,
    "replay": replay,
    "bench": bench,
    "watch": watch,
    "plot": plot,
    "list": list_names,
    "check-env": check_env,
}
