"""Kills a run's main process again and again, resumes it each time, and compares the result with an undisturbed run.

A run that ends before the last kill is compared and followed by another one.
`python scripts/chaos_resume.py --kills 50` exits with 0 if the final weights are equal bit for bit, if no checkpoint
was ever unreadable, no line of metrics.jsonl or ledger.jsonl torn, lost or doubled, and no process left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import load_file

from freerun.persistence import checkpoint

MODES = {"sequential": (1,), "sync": (2,), "pipes": (1, 2, 3), "executor": (2,), "freerun": (1, 2, 3)}
PPO = ["CartPole-v1", "--steps-per-update", "512", "--num-epochs", "2", "--minibatch-size", "128", "--normalize-obs"]
SAC = ["Pendulum-v1", "--algo", "sac", "--hidden-sizes", "32", "32", "--batch-size", "64", "--steps-per-update", "200",
       "--learning-starts", "400", "--buffer-size", "3000", "--updates-per-step", "0.5"]  # fmt: skip
EARLY_SHARE = 0.2
"""The share of kills that may come before the first new checkpoint."""
SETTINGS = {"ppo": PPO, "sac": SAC}


def freerun(words: list[str], log: Path) -> psutil.Popen:
    with log.open("ab") as file:
        return psutil.Popen([sys.executable, "-m", "freerun", "train", *words], stdout=file, stderr=file)


def finish(words: list[str], log: Path) -> None:
    if freerun(words, log).wait(timeout=1800) != 0:
        raise SystemExit(f"a run failed:\n{log.read_text()[-3000:]}")


def killed(early: bool, seconds: float, words: list[str], run_dir: Path, log: Path) -> bool:
    """Start a run and kill it after some seconds; False if it ended before.

    The time counts from the start if `early`, otherwise from the first new checkpoint."""
    before = checkpoint.names(run_dir)
    process = freerun(words, log)
    # A kill before the first new checkpoint only repeats the life before, so most kills wait for one.
    while not early and process.poll() is None and checkpoint.names(run_dir) in ([], before):
        time.sleep(0.01)
    try:
        code = process.wait(timeout=seconds)
    except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
        family = process.children(recursive=True)  # before the kill: orphans have another parent
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=5)
        if alive:
            raise SystemExit(f"processes outlive their run: {alive}") from None
        return True
    if code != 0:
        raise SystemExit(f"a run failed:\n{log.read_text()[-3000:]}")
    return False


def check_checkpoints(run_dir: Path) -> int:
    """Load every checkpoint. A kill may leave a half-written folder, but never under the name of a checkpoint."""
    names = checkpoint.names(run_dir)
    for name in names:
        checkpoint.load(checkpoint.folder_of(run_dir) / name)
    return len(names)


def check_lines(run_dir: Path, reference: Path) -> None:
    for name in ("metrics.jsonl", "ledger.jsonl"):
        ours, theirs = (
            [json.loads(line)["update"] for line in (path / name).read_text().splitlines()]
            for path in (run_dir, reference)
        )
        if ours != theirs:
            raise SystemExit(f"{name} has other updates than in the undisturbed run")
    ours_ledger, theirs_ledger = ((path / "ledger.jsonl").read_bytes() for path in (run_dir, reference))
    if ours_ledger != theirs_ledger:
        raise SystemExit("ledger.jsonl differs from that of the undisturbed run")


def chaos(algo: str, num_kills: int, total_steps: int, most_seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    draw = random.Random(seed)
    settings = [*SETTINGS[algo], "--deterministic", "--seed", str(seed), "--total-steps", str(total_steps)]
    settings += ["--checkpoint-every", "1", "-q"]  # after every update, so that many kills meet one being written
    log = folder / "log.txt"
    reference = folder / "undisturbed"
    began = time.monotonic()
    finish([*settings, "--mode", "pipes", "--num-workers", "2", "--run-dir", str(reference)], log)
    alone_seconds = round(time.monotonic() - began, 1)
    found: dict[str, Any] = {"algo": algo, "kills": 0, "lives": 0, "runs": 0, "undisturbed_seconds": alone_seconds}
    while found["kills"] < num_kills:
        run_dir = folder / f"killed-{found['runs']}"
        found["runs"] += 1
        run_with_kills(run_dir, settings, found, num_kills, most_seconds, draw, log)
        ours, theirs = (load_file(path / "policy.safetensors") for path in (run_dir, reference))
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
        check_lines(run_dir, reference)
    return found


def run_with_kills(
    run_dir: Path,
    settings: list[str],
    found: dict[str, Any],
    num_kills: int,
    most_seconds: float,
    draw: random.Random,
    log: Path,
) -> None:
    """Play one run to its end, with kills; add what happened to `found`."""
    while True:
        mode = draw.choice(list(MODES))
        where = ["--mode", mode, "--num-workers", str(draw.choice(MODES[mode])), "-q"]
        has_begun = bool(checkpoint.names(run_dir))
        words = ["--resume", str(run_dir), *where] if has_begun else [*settings, *where, "--run-dir", str(run_dir)]
        found["lives"] += 1
        if found["kills"] >= num_kills:
            finish(words, log)
            return
        early = draw.random() < EARLY_SHARE
        if not killed(early, draw.uniform(0, 8 if early else most_seconds), words, run_dir, log):
            return
        found["kills"] += 1
        num_kept = check_checkpoints(run_dir)
        print(f"kill {found['kills']:2} in {mode}: {num_kept} checkpoints, all whole", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", choices=SETTINGS, default="ppo")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--total-steps", type=int, default=150_000)
    parser.add_argument("--most-seconds", type=float, default=1.5, help="the longest time of learning before a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; it is kept afterwards")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="freerun-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = chaos(options.algo, options.kills, options.total_steps, options.most_seconds, options.seed, folder)
    if options.folder is None:
        shutil.rmtree(folder)
    print(f"{found['kills']} kills in {found['runs']} runs: the same weights, bit for bit; {json.dumps(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
