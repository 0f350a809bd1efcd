"""How fast each mode collects while PPO trains, and how far that is from the limit.

Every figure is taken from runs in processes of their own, interleaved (each repetition runs every case once) and
repeated; the table shows medians and spreads. Efficiency = steps/s × mean step time / workers: the share of the time
that a worker's environment is being stepped. Where workers outnumber cores and steps use the processor, the limit is
the cores: there, workers count as no more than cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro
from pictures import is_drawn
from run_file import ResultFile, write_report

RESULTS = "throughput.json"
WARM_UP_UPDATES = 2
MEMORY_SAMPLE_SECONDS = 1.0
BARE_SECONDS = 3.0
STEPS_PER_EPISODE = {"freerun/Straggler-v0": 100, "CartPole-v1": 50, "HalfCheetah-v5": 1000}
"""Rounded; of CartPole, early in a run."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    env: str
    mode: str
    num_workers: int
    max_lag: int = 0
    num_epochs: int = 4
    episodes_per_update: int = 0
    num_updates: int = 8
    learner_threads: int = 1
    envs_per_worker: int = 1
    segment_steps: int | None = None
    """Of mode freerun; whole episodes if not given."""

    @property
    def name(self) -> str:
        learner = f"{self.num_epochs} epochs, {self.learner_threads} threads"
        return f"{self.env} {self.shown_mode} × {self.num_workers}, lag {self.max_lag}, {learner}"

    @property
    def shown_mode(self) -> str:
        return self.mode if self.segment_steps is None else f"{self.mode}, segments of {self.segment_steps}"

    @property
    def work(self) -> dict[str, int]:
        """What an update learns from and when the run ends, in episodes or, with segments, in as many steps."""
        num_updates = self.num_updates + WARM_UP_UPDATES
        if self.segment_steps is None:
            episodes = self.episodes_per_update
            return {"episodes_per_update": episodes, "total_episodes": episodes * num_updates}
        lanes = self.num_workers * self.envs_per_worker
        steps = self.episodes_per_update * STEPS_PER_EPISODE[self.env]
        steps = max(1, steps // (lanes * self.segment_steps)) * lanes * self.segment_steps
        return {
            "steps_per_update": steps,
            "total_steps": steps * num_updates,
            "envs_per_worker": self.envs_per_worker,
            "segment_steps": self.segment_steps,
        }


@dataclass(frozen=True)
class Figures:
    steps_per_second: float
    episodes_per_second: float
    limit_seconds: float
    """Mean time of a bare step over the number of environments that can be stepped at once."""
    startup_seconds: float
    worker_megabytes: float
    """Memory of a worker's own (USS), mean over workers."""


@dataclass(frozen=True)
class Options:
    repeats: int = 3
    """How often each case is run."""
    workers: tuple[int, ...] = (1, 10, 25, 50, 100)
    """Numbers of workers on Straggler."""
    envs: tuple[str, ...] = ("freerun/Straggler-v0", "CartPole-v1", "HalfCheetah-v5")
    """Environments."""
    output: Path = Path(__file__).parent / "results" / "throughput"
    """Folder for throughput.json, throughput.md and throughput.png."""
    fresh: bool = False
    """Measure the chosen cases anew, instead of adding to what was measured with the same sources."""
    report_only: bool = False
    """Write table and picture again from throughput.json."""
    case: str | None = None
    """For the script's own use: run this one case (JSON) and print its figures."""


def cases(options: Options) -> list[Case]:
    chosen = []
    if "freerun/Straggler-v0" in options.envs:
        straggler = "freerun/Straggler-v0"
        chosen.append(Case(straggler, "sequential", 1, episodes_per_update=2, num_updates=4))
        for workers in options.workers:
            episodes = max(2, workers)
            updates = 4 if workers == 1 else 8  # a lone worker has nobody to wait for: little to measure
            chosen.append(Case(straggler, "sync", workers, episodes_per_update=episodes, num_updates=min(5, updates)))
            for mode in ("pipes", "executor", "freerun"):
                chosen += [Case(straggler, mode, workers, lag, 4, episodes, updates) for lag in (0, 1)]
            chosen.append(Case(straggler, "freerun", workers, 1, 4, episodes, updates, segment_steps=25))
        most = max(options.workers)
        # Without lag nobody collects during an update, so the learner may have all cores; and a lighter update.
        cores = os.cpu_count() or 1
        chosen += [Case(straggler, mode, most, 0, 1, most, learner_threads=cores) for mode in ("pipes", "executor")]
    for env, episodes in (("CartPole-v1", 200), ("HalfCheetah-v5", 4)):
        if env in options.envs:
            chosen.append(Case(env, "sequential", 1, episodes_per_update=episodes))
            chosen.append(Case(env, "sync", 2, episodes_per_update=episodes))
            for mode in ("pipes", "executor", "freerun"):
                chosen += [Case(env, mode, 2, lag, episodes_per_update=episodes) for lag in (0, 1)]
            num_envs, segment_steps = (32, 125) if env == "CartPole-v1" else (4, 250)
            chosen.append(
                Case(env, "freerun", 2, 1, 4, episodes, envs_per_worker=num_envs, segment_steps=segment_steps)
            )
    return chosen


# ---------------------------------------------------------------------------------------------- one case


def measure(case: Case) -> Figures:
    """Train; leave the first updates out; relate the rest to the mean time of a bare step."""
    import freerun

    memory: list[float] = []
    done = threading.Event()
    sampler = threading.Thread(target=_sample_memory, args=(memory, case.num_workers, done))
    with tempfile.TemporaryDirectory() as folder:
        sampler.start()
        result = freerun.train(
            case.env,
            mode=case.mode,
            num_workers=case.num_workers,
            max_lag=case.max_lag,
            **case.work,
            num_epochs=case.num_epochs,
            learner_threads=case.learner_threads,
            minibatch_size=2000,
            quiet=True,
            run_dir=Path(folder) / "run",
        )
        done.set()
        sampler.join()
        lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[WARM_UP_UPDATES - 1], lines[-1]
    seconds = last["wall_seconds"] - first["wall_seconds"]
    steps_per_second = (last["step"] - first["step"]) / seconds
    step_seconds, is_waiting = bare_step(case.env)
    parallel = case.num_workers if is_waiting else min(case.num_workers, os.cpu_count() or 1)
    return Figures(
        steps_per_second,
        (last["episodes"] - first["episodes"]) / seconds,
        step_seconds / parallel,
        result.summary["startup_seconds"],
        statistics.mean(memory) if memory else 0.0,
    )


def bare_step(env_id: str) -> tuple[float, bool]:
    """Mean wall seconds of a step with random actions, resets included; and whether it mostly waits."""
    from freerun.adapters.gymnasium_envs import GymnasiumFactory
    from freerun.tools.bench import bare_limit

    found = bare_limit.measure(GymnasiumFactory(env_id), 1, BARE_SECONDS)
    step_seconds = 1 / found["steps_per_second"]
    return step_seconds, found["cpu_seconds_per_step"] < 0.5 * step_seconds


def _sample_memory(sink: list[float], num_workers: int, done: threading.Event) -> None:
    """The workers' own memory, looked at once, during the warm-up: looking takes a core for a moment."""
    while not sink and not done.wait(MEMORY_SAMPLE_SECONDS):
        sizes = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if any("forkserver" in word for word in command) and process.ppid() != os.getpid():
                    sizes.append(process.memory_full_info().uss / 1e6)
        if len(sizes) >= num_workers:
            sink[:] = sizes


# ---------------------------------------------------------------------------------------------- all cases


def run_all(options: Options) -> None:
    chosen, file = cases(options), open_results(options.output)
    samples = read(file)
    for case in chosen:
        # Figures of other sources are not to be mixed.
        if case not in samples or options.fresh or not file.is_current(row_name(asdict(case))):
            samples[case] = []
    for repeat in range(options.repeats):
        for case in chosen:
            command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{case.name} failed:\n{done.stderr}")
            samples[case].append(Figures(**json.loads(done.stdout.splitlines()[-1])))
            print(f"[{repeat + 1}/{options.repeats}] {case.name}: {samples[case][-1]}", flush=True)
            file.content = as_content(samples)
            file.save(row_name(asdict(case)))  # what is measured so far is not lost when the rest is cut short


def read(file: ResultFile) -> dict[Case, list[Figures]]:
    """What was measured before: further runs with the same sources add to it."""
    samples = {}
    for found in file.content["cases"]:
        case = dict(found)
        taken = case.pop("samples")
        samples[Case(**case)] = [Figures(**sample) for sample in taken]
    return samples


def row_name(case: dict[str, Any]) -> str:
    return Case(**{name: value for name, value in case.items() if name != "samples"}).name


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / RESULTS, {"cases": []}, lambda report: map(row_name, report["cases"]))


def as_content(samples: dict[Case, list[Figures]]) -> dict[str, Any]:
    return {
        "machine": {"cores": os.cpu_count()},
        "cases": [
            {**asdict(case), "samples": [asdict(sample) for sample in taken]}
            for case, taken in samples.items()
            if taken
        ],
    }


def add_efficiency(report: dict[str, Any]) -> None:
    """Against the median of all bare measurements of an environment: a single one is as noisy as the machine."""
    limits: dict[tuple[str, int], list[float]] = {}
    for case in report["cases"]:
        limits.setdefault((case["env"], case["num_workers"]), []).extend(s["limit_seconds"] for s in case["samples"])
    for case in report["cases"]:
        for sample in case["samples"]:
            limit = statistics.median(limits[case["env"], case["num_workers"]])
            sample["efficiency"] = sample["steps_per_second"] * limit
    report["cases"].sort(key=lambda case: (-len(case["env"]), case["num_workers"]))


def table(report: dict[str, Any]) -> str:
    runs = [len(case["samples"]) for case in report["cases"]]
    lines = [
        f"PPO training all the while, {report['machine']['cores']} cores; median (lowest–highest) of "
        f"{many(runs)}, each in a process of its own.",
        "",
        "| environment | mode | workers | max lag | epochs / threads | steps/s | episodes/s | efficiency | start-up s "
        "| MB per worker |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in report["cases"]:

        def shown(name: str, form: str, scale: float = 1.0, unit: str = "", case: dict[str, Any] = case) -> str:
            values = sorted(scale * sample[name] for sample in case["samples"])
            spread = f" ({format(values[0], form)}–{format(values[-1], form)})" if len(values) > 1 else ""
            return f"{format(statistics.median(values), form)}{unit}{spread}"

        memory = statistics.median(sample["worker_megabytes"] for sample in case["samples"])
        lines.append(
            f"| {case['env']} | `{case['mode']}`{segments(case)} | {case['num_workers']} | {case['max_lag']} "
            f"| {case['num_epochs']} / {case['learner_threads']} "
            f"| {shown('steps_per_second', ',.0f')} | {shown('episodes_per_second', ',.1f')} "
            f"| {shown('efficiency', '.0f', 100, ' %')} | {shown('startup_seconds', '.1f')} "
            f"| {format(memory, '.0f') if memory else '–'} |"
        )
    return "\n".join(lines) + "\n"


def many(runs: list[int]) -> str:
    if max(runs) == 1:
        return "one run"
    return f"{min(runs)}–{max(runs)} interleaved runs" if min(runs) < max(runs) else f"{max(runs)} interleaved runs"


def segments(case: dict[str, Any]) -> str:
    if case["segment_steps"] is None:
        return ""
    envs = f", {case['envs_per_worker']} environments each" if case["envs_per_worker"] > 1 else ""
    return f", segments of {case['segment_steps']}{envs}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Efficiency against the number of workers on Straggler: how much of their time workers do not wait."""
    from pictures import make_plots, save

    figure, (plot,) = make_plots(1, inches=(7.5, 5.0))
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for case in report["cases"]:
        if case["env"] == "freerun/Straggler-v0" and case["num_epochs"] == 4 and case["mode"] != "sequential":
            efficiency = sorted(100 * sample["efficiency"] for sample in case["samples"])
            label = case["mode"] + (f", max lag {case['max_lag']}" if case["mode"] != "sync" else "")
            label += segments(case)
            point = (case["num_workers"], statistics.median(efficiency), efficiency[0], efficiency[-1])
            lines.setdefault(label, []).append(point)
    colors = {"sync": "#888888", "pipes": "#1f77b4", "executor": "#d62728", "freerun": "#2ca02c"}
    for label, points in lines.items():
        workers, middle, low, high = zip(*sorted(points), strict=True)
        style = "--" if "lag 0" in label else "-" if "segments" in label or "freerun" not in label else ":"
        color = colors[label.split(",")[0]]
        plot.plot(workers, middle, style, marker="o", markersize=4, color=color, label=label)
        plot.fill_between(workers, low, high, color=color, alpha=0.12, linewidth=0)
    plot.axhline(100, color="black", linewidth=0.8)
    plot.set(xlabel="workers", ylabel="time that environments are stepped (%)", ylim=(0, 105))
    cores = report["machine"]["cores"]
    plot.set_title(f"Slow, uneven environment (10 ms a step, up to 50), PPO training, {cores} cores", fontsize=10)
    save(figure, path)


def write_reports(folder: Path) -> str:
    file, picture = open_results(folder), folder / "throughput.png"
    add_efficiency(file.content)
    if not is_drawn(picture):
        draw(file.content, picture)
    return write_report(folder / "throughput.md", table(file.content), file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.case is not None:
        print(json.dumps(asdict(measure(Case(**json.loads(options.case))))))
        return
    if not options.report_only:
        run_all(options)
    print(write_reports(options.output))


if __name__ == "__main__":
    main()
