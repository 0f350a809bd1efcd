"""Kills for lack of memory are recognised: by counters as kernels write them, and by a real kill where possible."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freerun.core import OutOfMemory, WorkerDied
from freerun.transport.exit_diagnosis import ExitDiagnosis
from freerun.transport.memory_kills import KillCounter, OutOfMemoryKills

EVENTS = "low 0\nhigh 0\nmax 7\noom {0}\noom_kill {0}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {0}\n"
VMSTAT = "nr_free_pages 1234\noom_kill {0}\npgfault 99\n"
UNIFIED, VERSION_1 = "cgroup2 cgroup2 rw,nsdelegate", "cgroup cgroup rw,memory"


class Machine:
    """A /proc, and control groups as they are mounted there."""

    def __init__(self, folder: Path, cgroup: str, mounts: dict[str, tuple[str, str]]):
        """`mounts` by their folder: which group is mounted there, and what mountinfo says of it."""
        self.proc, self.groups = folder / "proc", folder / "sys fs"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text(cgroup)
        lines = ["22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"]
        for name, (root, kind) in mounts.items():
            where = str(self.groups / name).replace(" ", "\\040")
            lines.append(f"35 22 0:30 {root} {where} rw,nosuid shared:9 - {kind}")
        (self.proc / "self" / "mountinfo").write_text("\n".join(lines) + "\n")
        self.write("/vmstat", VMSTAT.format(5), self.proc)

    def write(self, path: str, text: str, folder: Path | None = None) -> None:
        file = (folder or self.groups) / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_a_kill_in_our_own_group_is_certain_and_explains_one_death(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/user/job\n", {"": ("/", UNIFIED)})
    machine.write("user/job/memory.events", EVENTS.format(2))
    machine.write("user/memory.events", EVENTS.format(2))
    kills = OutOfMemoryKills(machine.proc)
    assert kills.claim() is None
    for path, text in (("user/job/memory.events", EVENTS), ("user/memory.events", EVENTS)):
        machine.write(path, text.format(4))
    machine.write("vmstat", VMSTAT.format(7), machine.proc)
    assert [kills.claim() for _ in range(3)] == ["certain", "certain", None], "two kills, counted by three files each"


@pytest.mark.parametrize("path", ["user/memory.events", "vmstat"])
def test_a_kill_elsewhere_is_a_hint(path: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/user/job\n", {"": ("/", UNIFIED)})
    machine.write("user/job/memory.events", EVENTS.format(0))
    machine.write("user/memory.events", EVENTS.format(0))
    kills = OutOfMemoryKills(machine.proc)
    if path == "vmstat":
        machine.write(path, VMSTAT.format(6), machine.proc)
    else:
        machine.write(path, EVENTS.format(1))
    assert [kills.claim() for _ in range(2)] == ["likely", None]


def test_a_container_sees_only_its_own_group_under_a_longer_name(tmp_path: Path) -> None:
    cgroup = "4:memory:/docker/abc\n3:cpuset:/docker/abc\n0::/\n"
    machine = Machine(tmp_path, cgroup, {"memory": ("/docker/abc", VERSION_1), "unified": ("/", UNIFIED)})
    machine.write("memory/memory.oom_control", CONTROL.format(0))
    kills = OutOfMemoryKills(machine.proc)
    machine.write("memory/memory.oom_control", CONTROL.format(1))
    assert kills.claim() == "certain"


def test_a_kernel_that_counts_no_kills_says_that_the_limit_was_reached(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:memory:/job\n", {"memory": ("/", VERSION_1)})
    machine.write("memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n")
    machine.write("memory/job/memory.failcnt", "12\n")
    kills = OutOfMemoryKills(machine.proc)
    assert kills.claim() is None
    machine.write("memory/job/memory.failcnt", "15\n")
    assert kills.claim() == "likely"


def test_a_kill_of_long_ago_explains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    machine = Machine(tmp_path, "0::/job\n", {"": ("/", UNIFIED)})
    machine.write("job/memory.events", EVENTS.format(0))
    kills = OutOfMemoryKills(machine.proc)
    machine.write("job/memory.events", EVENTS.format(1))
    now += 5
    kills.refresh()
    now += 11
    assert kills.claim() is None
    now += 3600
    machine.write("job/memory.events", EVENTS.format(2))
    assert kills.claim() == "likely", "nobody read the counters for an hour: it may have been any process of the group"


@pytest.mark.parametrize("text", ["", "oom_kill", "oom_kill many\n", "\x00\xff"])
def test_files_that_make_no_sense_are_left_alone(text: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/job\n", {"": ("/", UNIFIED)})
    machine.write("job/memory.events", text)
    machine.write("vmstat", text, machine.proc)
    assert OutOfMemoryKills(machine.proc).claim() is None
    assert OutOfMemoryKills(tmp_path / "nothing").claim() is None


def test_error_messages_name_the_cause(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/job\n", {"": ("/", UNIFIED)})
    machine.write("job/memory.events", EVENTS.format(0))
    diagnosis = ExitDiagnosis(OutOfMemoryKills(machine.proc))
    machine.write("job/memory.events", EVENTS.format(1))
    certain = diagnosis.diagnose(2, 17, -signal.SIGKILL)
    assert isinstance(certain, OutOfMemory)
    assert "worker 2 died of SIGKILL: the kernel killed it for lack of memory; use fewer workers" in str(certain)
    machine.write("vmstat", VMSTAT.format(6), machine.proc)
    likely = diagnosis.diagnose(2, 18, -signal.SIGKILL)
    assert isinstance(likely, OutOfMemory)
    assert "probably for lack of memory" in str(likely)
    other = diagnosis.diagnose(2, 19, -signal.SIGKILL)
    assert type(other) is WorkerDied
    assert "which freerun did not send" in str(other)
    assert all(failure.from_outside for failure in (certain, likely, other))


def test_this_machine_has_a_counter_of_such_kills() -> None:
    assert OutOfMemoryKills().has_counters


GREEDY = "import sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0'); print(len(b'x' * (256 << 20)))"


def test_a_real_kill_for_lack_of_memory() -> None:
    """The kill happens in a control group that was made for it, so that nothing else is killed."""
    named = os.environ.get("FREERUN_TEST_CGROUP")
    if named is None:
        pytest.skip("FREERUN_TEST_CGROUP names no control group with a limit of some 64 MB for this test to fill")
    own = KillCounter(iter([Path(named) / "memory.events", Path(named) / "memory.oom_control"]))
    process = subprocess.run([sys.executable, "-c", GREEDY, named], capture_output=True)
    assert process.returncode == -signal.SIGKILL
    own.read(time.monotonic())
    assert own.take()
