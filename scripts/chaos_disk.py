"""Tests of what a run does with damaged checkpoints and with a full disk.

`python scripts/chaos_disk.py` trains a little. Then it truncates the newest checkpoint at every 1,000th byte, flips
10,000 random bits in it one at a time, and swaps and removes its files. Each time, the damaged checkpoint must be
refused and the one before it be used. Then a run gets a folder of 2 MB (a tmpfs in a mount namespace of its own): it
must report the full disk, go on, and be resumable.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from freerun.persistence import checkpoint

IN_NAMESPACE = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
SMALL_PPO = ["CartPole-v1", "--mode", "sequential", "--steps-per-update", "256", "--num-epochs", "1", "-q"]
SMALL_SAC = ["Pendulum-v1", "--algo", "sac", "--mode", "sequential", "--hidden-sizes", "32", "--batch-size", "32",
             "--learning-starts", "200", "--steps-per-update", "200", "--updates-per-step", "0.1", "-q"]  # fmt: skip


def train(words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "freerun", "train", *words], check=True, stdout=subprocess.DEVNULL)


class DamagedCheckpoint:
    """The newest checkpoint of a run, which is damaged and repaired again and again."""

    def __init__(self, run_dir: Path):
        *_, before, newest = checkpoint.names(run_dir)
        self._run_dir = run_dir
        self.path = checkpoint.folder_of(run_dir) / newest
        self._before = checkpoint.folder_of(run_dir) / before
        own = set(checkpoint.verify(self.path)) - set(checkpoint.verify(self._before))
        shared = [self.path / name for name in own if name.startswith("..")]  # rows that only this one needs
        self.files = [*sorted(path for path in self.path.iterdir()), *shared]
        self.num_cases = 0

    def must_be_refused(self, what: str) -> None:
        self.num_cases += 1
        found = checkpoint.newest(self._run_dir).path
        if found != self._before:
            raise SystemExit(f"{what}: {found.name} was used")

    def cut_off(self, every: int) -> None:
        for path in self.files:
            content = path.read_bytes()
            for length in range(0, len(content), every):
                path.write_bytes(content[:length])
                self.must_be_refused(f"{path.name} cut off at {length}")
            path.write_bytes(content)

    def flip_bits(self, num: int, seed: int) -> None:
        draw = random.Random(seed)
        contents = {path: bytearray(path.read_bytes()) for path in self.files}
        sizes = [len(content) for content in contents.values()]
        # Weighted by size, so that every bit of the checkpoint is equally likely.
        for path in draw.choices(self.files, sizes, k=num):
            content = contents[path]
            place, bit = draw.randrange(len(content)), draw.randrange(8)
            content[place] ^= 1 << bit
            path.write_bytes(content)
            self.must_be_refused(f"bit {bit} of byte {place} of {path.name} flipped")
            content[place] ^= 1 << bit
            path.write_bytes(content)

    def swap_and_remove(self) -> None:
        for path in self.files:
            self._while_moved(path, lambda path: None, "missing")
        own = [path for path in self.files if path.parent == self.path]
        for one, other in itertools.permutations(own, 2):
            self._while_moved(one, functools.partial(shutil.copy, other), f"replaced by {other.name}")
        for path in own:
            elsewhere = self._before / path.name
            if elsewhere.read_bytes() != path.read_bytes():  # otherwise the copy would be no damage
                self._while_moved(path, functools.partial(shutil.copy, elsewhere), "of another checkpoint")

    def _while_moved(self, path: Path, put: Callable[[Path], object], what: str) -> None:
        content = path.read_bytes()
        path.unlink()
        put(path)
        self.must_be_refused(f"{path.name} {what}")
        path.write_bytes(content)

    def must_be_whole(self) -> None:
        if checkpoint.newest(self._run_dir).path != self.path:
            raise SystemExit("the repaired checkpoint is not used")


def damage(words: list[str], folder: Path, num_bits: int, every: int) -> int:
    train([*words, "--run-dir", str(folder / "run"), "--checkpoint-every", "1"])
    victim = DamagedCheckpoint(folder / "run")
    logging.getLogger("freerun").setLevel(logging.ERROR)  # each refusal is a warning, and there are thousands
    victim.cut_off(every)
    victim.flip_bits(num_bits, seed=0)
    victim.swap_and_remove()
    victim.must_be_whole()
    return victim.num_cases


def has_namespaces() -> bool:
    return (
        subprocess.run([*IN_NAMESPACE, "mount -t tmpfs tmpfs /tmp"], capture_output=True, check=False).returncode == 0
    )


def full_disk(folder: Path, kilobytes: int, hidden_size: int, total_steps: int) -> str:
    """Train in a folder of that size, resume there, and copy the run folder out; return what the runs printed."""
    small = folder / "small"
    small.mkdir()
    python = f"{sys.executable} -m freerun train"
    words = " ".join([*SMALL_PPO, "--hidden-sizes", str(hidden_size), str(hidden_size), "--checkpoint-every", "1"])
    # The tmpfs is gone with its namespace, so what is to be examined is copied out. 99 stands for a failed mount.
    script = f"""
        mount -t tmpfs -o size={kilobytes}k tmpfs {small} || exit 99
        {python} {words} --total-steps {total_steps} --run-dir {small}/run; echo "ended with $?"
        cp -a {small}/run {folder}/first
        {python} --resume {small}/run --total-steps {total_steps + 3000}; echo "ended with $?"
        cp -a {small}/run {folder}/second
    """
    done = subprocess.run([*IN_NAMESPACE, script], capture_output=True, text=True, check=False, timeout=600)
    said = done.stdout + done.stderr
    if "no checkpoint could be written" not in said or said.count("ended with") != 2 or "Traceback" in said:
        raise SystemExit(f"a full disk ended the run, or was not reported:\n{said}")
    for name in ("first", "second"):
        for lines in ("metrics.jsonl", "ledger.jsonl"):
            updates = [json.loads(line)["update"] for line in (folder / name / lines).read_text().splitlines()]
            if updates != list(range(1, len(updates) + 1)):
                raise SystemExit(f"{lines} has torn, lost or doubled lines")
        for found in checkpoint.names(folder / name):
            checkpoint.load(checkpoint.folder_of(folder / name) / found)
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="freerun-chaos-") as name:
        folder = Path(name)
        for place, words in enumerate((SMALL_PPO, SMALL_SAC)):
            (folder / str(place)).mkdir()
            total = ["--total-steps", "2000"]
            num_cases = damage([*words, *total], folder / str(place), options.bits, every=1000)
            print(
                f"{words[0]}: {num_cases:,} damaged checkpoints, all refused, the one before used each time", flush=True
            )
        if not has_namespaces():
            print("the test of a full disk was skipped: unshare --mount is not allowed here")
            return 1
        (folder / "disk").mkdir()
        print(full_disk(folder / "disk", 2048, 192, 20_000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
