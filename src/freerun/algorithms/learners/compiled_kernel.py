"""The fast learner's C kernel: compiled by the machine's own compiler, once, and kept in a cache folder.

Everything here may fail: there may be no compiler, no folder to write to, or a processor that the compiler does not
know. Then there is no kernel, and numpy computes instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import ClassVar

logger = logging.getLogger("freerun")

SOURCE, *HEADERS = (Path(__file__).with_name(name) for name in ("kernel.c", "ppo.h", "mlp.h", "threads.h"))
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-pthread")
"""No -ffast-math: the kernel must not assume that numbers are finite."""
COMPILER_SECONDS = 60.0
"""A compiler that takes longer is given up. It needs a second."""
CTYPES_INT, CTYPES_FLOAT, CTYPES_POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class LayerStruct(ctypes.Structure):
    """`struct layer` of mlp.h."""

    _fields_: ClassVar = [
        *((name, CTYPES_INT) for name in ("inputs", "outputs")),
        *((name, CTYPES_POINTER) for name in ("weight", "bias", "weight_gradient", "bias_gradient")),
        *((name, CTYPES_INT) for name in ("input_stride", "output_stride")),
        *((name, CTYPES_POINTER) for name in ("by_input", "by_output", "sums", "activated", "gradient")),
    ]


class NetworkStruct(ctypes.Structure):
    """`struct network` of mlp.h."""

    _fields_: ClassVar = [
        *((name, CTYPES_INT) for name in ("num_layers", "activation")),
        *((name, CTYPES_POINTER) for name in ("layers", "scratch")),
        *((name, CTYPES_INT) for name in ("widest", "version")),
        *((name, CTYPES_POINTER) for name in ("by_input_version", "by_output_version")),
    ]


class PPOStruct(ctypes.Structure):
    """`struct ppo` of ppo.h."""

    _fields_: ClassVar = [
        *((name, CTYPES_POINTER) for name in ("actor", "critic")),
        *((name, CTYPES_INT) for name in ("num_threads", "obs_size", "critic_first", "num_categories", "has_mask")),
        *((name, CTYPES_POINTER) for name in ("categories", "log_std", "log_std_gradient", "log_std_sums")),
        *((name, CTYPES_POINTER) for name in ("actor_rows", "critic_rows", "d_log_prob", "advantage_rows")),
        *((name, CTYPES_POINTER) for name in ("obs", "action", "proximal", "weight", "advantage", "target", "value")),
        *((name, CTYPES_FLOAT) for name in ("clip_range", "value_coef", "value_clip", "masked_logit")),
        ("normalizes", CTYPES_INT),
        *((name, CTYPES_FLOAT) for name in ("policy_loss", "value_loss")),
        ("parts", CTYPES_POINTER),
    ]


class AdamStruct(ctypes.Structure):
    """`struct adam` of kernel.c."""

    _fields_: ClassVar = [
        ("size", CTYPES_INT),
        *((name, CTYPES_POINTER) for name in ("weights", "gradient", "mean", "square", "num_steps")),
        *((name, CTYPES_FLOAT) for name in ("max_norm", "learning_rate", "beta1", "beta2", "epsilon")),
    ]


class DescentStruct(ctypes.Structure):
    """`struct descent` of kernel.c."""

    _fields_: ClassVar = [("policy_loss", CTYPES_FLOAT), ("value_loss", CTYPES_FLOAT), ("num_bad", CTYPES_INT)]


class Kernel:
    """The functions of kernel.c. They release Python's lock while they compute."""

    def __init__(self, library: ctypes.CDLL):
        pointer, integer, number = CTYPES_POINTER, CTYPES_INT, CTYPES_FLOAT
        self.ppo_forward = library.ppo_forward
        self.ppo_forward.argtypes = (pointer, pointer, integer, pointer, pointer, integer)
        self.ppo_forward.restype = integer
        self.ppo_backward = library.ppo_backward
        self.ppo_backward.argtypes = (pointer, pointer, integer, number)
        self.ppo_backward.restype = None
        self.ppo_descend = library.ppo_descend
        self.ppo_descend.argtypes = (pointer, integer, pointer, pointer, number, pointer, pointer, pointer)
        self.ppo_descend.restype = integer
        self.network_forward = library.network_forward
        self.network_forward.argtypes = (pointer, integer, pointer, integer, integer, pointer)
        self.network_forward.restype = None
        self.adam_step = library.adam_step
        self.adam_step.argtypes = (pointer,)
        self.adam_step.restype = integer
        self.num_tasks = library.num_tasks
        self.num_tasks.argtypes, self.num_tasks.restype = (integer,), integer
        self.set_threads = library.set_threads
        self.set_threads.argtypes, self.set_threads.restype = (integer,), None
        sizes = ("floats_in_a_vector", "rows_in_a_block", "most_parts", "most_threads", "get_threads")
        for name in sizes:
            getattr(library, name).restype = integer
        self._lanes, self.block_rows, self.most_parts, self.most_threads = (
            int(getattr(library, name)()) for name in sizes[:-1]
        )
        self._get_threads = library.get_threads

    def num_threads(self) -> int:
        """How many threads compute, in this process."""
        return int(self._get_threads())

    def padded(self, size: int) -> int:
        """How many numbers a row takes in the kernel's own arrays: whole vectors."""
        return -(-size // self._lanes) * self._lanes


@functools.cache
def compiled_kernel() -> Kernel | None:
    """The kernel of this machine, or None where it cannot be compiled."""
    try:
        return Kernel(_load())
    except (OSError, subprocess.SubprocessError, RuntimeError) as failure:
        # It is no fault: many machines have no compiler, and numpy computes the same.
        logger.info("there is no compiled kernel, so numpy computes gradients: %s", failure)
        return None


def set_kernel_threads(num_threads: int) -> None:
    """Let the kernel compute with so many threads from now on, in this process, if it is in use."""
    is_in_use = compiled_kernel.cache_info().currsize > 0
    if is_in_use and (kernel := compiled_kernel()) is not None:
        kernel.set_threads(num_threads)


def useful_threads(minibatch_size: int) -> int:
    """How many threads the kernel has work for in a gradient step."""
    kernel = compiled_kernel()
    return 1 if kernel is None else min(kernel.most_threads, int(kernel.num_tasks(minibatch_size)))


def _load() -> ctypes.CDLL:
    """Load the library from the cache, and compile it first if it is not there."""
    texts = [*(path.read_text(encoding="utf-8") for path in (SOURCE, *HEADERS)), *FLAGS, _machine()]
    name = f"kernel-{hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:16]}.so"
    folder = _cache_folder()
    if folder is not None and _is_ours(folder / name):
        with contextlib.suppress(OSError):  # a file that a full disk has cut off is compiled again
            return ctypes.CDLL(str(folder / name))
    if folder is not None:
        _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="compiling-") as temporary:
        made = Path(temporary) / name
        compiler = shlex.split(os.environ.get("CC", "")) or [_compiler()]
        command = [*compiler, *FLAGS, "-shared", "-fPIC", str(SOURCE), "-o", str(made), "-lm"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMPILER_SECONDS)
        done.check_returncode()
        library = ctypes.CDLL(str(made))
        if folder is not None:
            # At once there, and whole: others may be looking for it, or may have just put the same there.
            made.chmod(0o700)
            os.replace(made, folder / name)
        return library  # it stays loaded when its file is gone


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes left behind that were killed while they compiled."""
    for left in folder.glob("compiling-*"):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            # A compiler that still runs began less than COMPILER_SECONDS ago.
            if time.time() - left.stat().st_mtime > 2 * COMPILER_SECONDS:
                shutil.rmtree(left)


def _compiler() -> str:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError("there is no C compiler")
    return found


def _cache_folder() -> Path | None:
    """A folder of this user that can be written to; None if there is none."""
    try:
        base = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(base) if base else Path.home() / ".cache") / "freerun"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a file system that is read-only; no home
        return None
    return folder if _is_ours(folder) and os.access(folder, os.W_OK | os.X_OK) else None


def _is_ours(path: Path) -> bool:
    """True if it exists and nobody else can have written it: a library is code, which runs as this user."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _machine() -> str:
    """What the compiled code depends on: a home folder may be shared by machines with different processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = [platform.processor()]
    names = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join([platform.machine(), *platform.libc_ver(), *(line for line in lines if line.startswith(names))])
