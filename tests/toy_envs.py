"""Small environments whose right answers are known."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import struct
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Obs = NDArray[np.float32]
Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Audit(gymnasium.Env[Any, Any]):
    """Observations carry a number drawn from the seed, and the step: a row of another episode or step shows.

    Episodes last `short` or `long` steps, half each by their seed, and end by truncation or termination, half each.
    """

    def __init__(self, short: int = 20, long: int = 200, step_seconds: float = 0.0):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._lengths = (short, long)
        self._step_seconds = step_seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self._mark = float(self.np_random.random())
        self._length = self._lengths[int(self.np_random.integers(2))]
        self._by_truncation = bool(self.np_random.integers(2))
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> Step:
        if self._step == self._length:
            raise RuntimeError("stepped past the end of the episode")
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self._step += 1
        ended = self._step == self._length
        return self._observe(), float(self._step), ended and not self._by_truncation, ended and self._by_truncation, {}

    def _observe(self) -> Obs:
        return np.array([self._mark / 100, self._step / 100, self._length / 100], np.float32)


class OneBit(gymnasium.Env[Any, Any]):
    """The action that equals the bit shown earns 1. Ten steps. Learned in seconds."""

    def __init__(self, kind: str = "discrete") -> None:
        self.observation_space = spaces.Box(0, 1, (2,), np.float64)
        self._kind = kind
        self.action_space = {
            "discrete": spaces.Discrete(2, start=5),
            "multidiscrete": spaces.MultiDiscrete([2, 3]),
            "box": spaces.Box(-1.0, 1.0, (1, 2), np.float32),
        }[kind]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> Step:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        if self._kind == "discrete":
            reward = float(action - 5 == self._bit)
        elif self._kind == "multidiscrete":
            reward = float(action[0] == self._bit) + float(action[1] == 2 * self._bit)
        else:
            reward = 1.0 - float(np.abs(action - (2 * self._bit - 1) * 0.5).mean())
        self._step += 1
        return self._observe(), reward, self._step == 10, False, {}

    def _observe(self) -> Any:
        self._bit = int(self.np_random.integers(2))
        return np.array([self._bit, 1 - self._bit], np.float64)


class Privileged(gymnasium.Env[Any, Any]):
    """As OneBit; besides, every step of an episode earns 3 or nothing by chance: only the value function sees which.

    With `tells=False` it does not see it either. With `num_actions`, actions are a Box that earns nothing."""

    def __init__(self, tells: bool = True, num_actions: int = 0) -> None:
        group = spaces.Box(0, 1, (2,), np.float32)
        self.observation_space = spaces.Dict({"policy": group, "critic": spaces.Box(0, 1, (3,), np.float32)})
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        if num_actions:
            self.action_space = spaces.Box(-1, 1, (num_actions,), np.float32)
        self._tells = tells

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._luck = 0, int(self.np_random.integers(2))
        return self._observe(), {}

    def step(self, action: Any) -> Step:
        reward = float(np.ndim(action) == 0 and action == self._bit) + 3.0 * self._luck
        self._step += 1
        return self._observe(), reward, self._step == 10, False, {}

    def _observe(self) -> Any:
        self._bit = int(self.np_random.integers(2))
        told = np.array([self._luck * self._tells, self._step / 10, self._bit], np.float32)
        return {"policy": np.array([self._bit, 1 - self._bit], np.float32), "critic": told}


class Endless(gymnasium.Env[Any, Any]):
    """One state, reward 1, truncated after 10 steps: worth 1 / (1 − gamma), and not less for the truncation."""

    def __init__(self, num_steps: int = 10) -> None:
        self._num_steps = num_steps
        self.observation_space = spaces.Box(0, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Step:
        self._step += 1
        return np.ones(1, np.float32), 1.0, False, self._step == self._num_steps, {}


class DictObs(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {"a": spaces.Box(0, 1, (2, 2), np.float32), "b": spaces.Discrete(3), "c": spaces.MultiBinary(2)}
        )
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> Step:
        self._step += 1
        return self._observe(), 0.0, False, self._step == 5, {}

    def _observe(self) -> Any:
        return {
            "a": np.full((2, 2), 0.5, np.float32),
            "b": np.int64(self._step % 3),
            "c": np.array([1, 0], np.int8),
        }


class Broken(Audit):
    """Fails in its fourth step, in the given way."""

    def __init__(self, how: str) -> None:
        super().__init__(short=10, long=10)
        self._how = how
        if how == "construct" and "torch" not in sys.modules:  # only in workers
            raise RuntimeError("cannot be built here")

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = super().step(action)
        if self._step == 4:
            if self._how == "raise":
                raise ZeroDivisionError("the simulator fell over, 100% of it")
            if self._how == "nan-obs":
                obs[0] = np.nan
            if self._how == "nan-reward":
                reward = float("nan")
            if self._how == "shape":
                obs = np.zeros(7, np.float32)
            if self._how == "die":
                os._exit(7)
        return obs, reward, terminated, truncated, info


class Faulty(Audit):
    """Goes wrong in some of its episodes, by their seed: each time the same ones, however often they are tried."""

    def __init__(self, how: str, share: float = 0.05) -> None:
        super().__init__(short=5, long=30)
        self._how = how
        self._share = share

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        by_chance = self._how == "die-at-random"  # at another time it may go well
        self._is_bad = (random.random() if by_chance else self.np_random.random()) < self._share
        if self._is_bad and self._how == "reset":
            raise ZeroDivisionError("the simulator did not start")
        return obs, info

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = super().step(action)
        if self._is_bad and self._step == 4:
            if self._how == "raise":
                raise ZeroDivisionError("the simulator fell over")
            if self._how == "nan":
                obs[0] = np.nan
            if self._how == "inf":
                reward = float("inf")
            if self._how in ("die", "die-at-random"):
                os._exit(7)
            if self._how == "exit":
                sys.exit(3)
        return obs, reward, terminated, truncated, info


class Overflows(Audit):
    """One episode in five has a reward whose square no float32 holds: finite, and no loss of it is."""

    def __init__(self, actions: str = "discrete") -> None:
        super().__init__(short=10, long=10)
        if actions == "box":
            self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        self._is_bad = self.np_random.random() < 0.2
        return obs, info

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, 3e38 if self._is_bad and self._step == 3 else reward, terminated, truncated, info


class FailsOnce(Audit):
    """The first worker that gets to the fourth step of any episode fails there; the file remembers."""

    def __init__(self, path: str, how: str = "die", step_seconds: float = 0.0) -> None:
        super().__init__(short=10, long=30, step_seconds=step_seconds)
        self._path = path
        self._how = how

    def step(self, action: Any) -> Step:
        if self._step == 4 and self._how == "raise-always":
            fail("raise")
        if self._step == 4 and self._how != "never":
            try:
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                fail(self._how)
        return super().step(action)


def fail(how: str) -> None:
    if how == "die":
        os._exit(9)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        stuck_for_ever()
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raise":
        raise ZeroDivisionError("the simulator fell over")


def stuck_for_ever() -> None:
    time.sleep(1000)


class NotesItsEnd(Audit):
    """Leaves a file when it is closed in a process of its own."""

    def __init__(self, folder: str) -> None:
        super().__init__(short=5, long=5)
        self._folder = folder

    def close(self) -> None:
        open(f"{self._folder}/{os.getpid()}", "w").close()


class WhereAmI(Audit):
    """Shows which process it runs in and whether torch is loaded there."""

    def __init__(self) -> None:
        super().__init__(short=5, long=5)

    def _observe(self) -> Obs:
        return np.array([os.getpid(), "torch" in sys.modules, 0], np.float32)


class Square(OneBit):
    """A bright square in a dark picture, on the side that is the right action. Nothing a flat MLP could not do, but
    pictures travel as uint8 and a convolution sees them as such."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (1, 8, 8), np.uint8)

    def _observe(self) -> NDArray[Any]:
        super()._observe()
        picture = np.zeros((1, 8, 8), np.uint8)
        left = 5 * self._bit
        picture[0, 2:5, left : left + 3] = 255
        return picture


class NoSpaces(gymnasium.Env[Any, Any]):
    """Its author forgot them."""


class UnsupportedObs(Audit):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Sequence(spaces.Discrete(3))


class UnsupportedAction(Audit):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Tuple([spaces.Discrete(2)])


def not_an_env() -> int:
    return 3


class FailsInEpisode(Audit):
    """Raises in the one episode that was given this seed."""

    def __init__(self, seed: int):
        super().__init__()
        self._bad_seed = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        if seed == self._bad_seed:
            raise ZeroDivisionError("the simulator fell over")
        return super().reset(seed=seed, options=options)


class WithToken(OneBit):
    """It talks to a server, say."""

    def __init__(self, api_token: str = "", url: str = ""):
        super().__init__()


class Babbles(WithToken):
    """Its errors say more than they should."""

    def __init__(self, api_token: str = "", url: str = ""):
        super().__init__()
        self._api_token = api_token

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise ConnectionError(f"refused: {self._api_token}")


def leave_a_mark(command: str) -> None:
    """What somebody might have the user's machine do."""
    Path(command).touch()


class SlowToBuild(Audit):
    """Takes its time before the first episode."""

    def __init__(self) -> None:
        time.sleep(0.5)
        super().__init__()


class NotesItsSeeds(OneBit):
    """Writes down the seed of every episode that begins, a line each."""

    def __init__(self, path: str):
        super().__init__()
        self._path = path

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{seed}\n")
        return super().reset(seed=seed)


class PromisesPictures(OneBit):
    """Takes a render_mode and has no pictures: `render` raises, or returns what is none."""

    def __init__(self, how: str = "raise", render_mode: str | None = None):
        super().__init__()
        self._how = how
        self.render_mode = render_mode

    def render(self) -> Any:
        return super().render() if self._how == "raise" else "a text"


class FourNumbers(Audit):
    """As many observations as CartPole has, of the same kind; and one more action."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)


def StrongPendulum() -> gymnasium.Env[Any, Any]:
    """Pendulum-v1 with another range of actions."""
    env = gymnasium.make("Pendulum-v1")
    return gymnasium.wrappers.RescaleAction(env, np.float32(-3.0), np.float32(3.0))


class KilledWhileItSends(Audit):
    """Its observations are so large that an episode travels in pieces. The first worker dies after the first one."""

    WIDTH = 100_000

    def __init__(self, path: str) -> None:
        super().__init__(short=10, long=10)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.WIDTH,), np.float32)
        self._path = path

    def step(self, action: Any) -> Step:
        if self._step == 4:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL))
                die_in_the_next_large_message()
        return super().step(action)

    def _observe(self) -> Obs:
        return np.full(self.WIDTH, self._mark, np.float32)


def die_in_the_next_large_message() -> None:
    """After its first bytes have been written, as if somebody had killed this process at that moment."""
    send_bytes = Connection.send_bytes

    def send_some(self: Any, message: Any, *rest: Any) -> None:
        if len(message) < KilledWhileItSends.WIDTH:
            send_bytes(self, message, *rest)
            return
        # As `Connection` sends it: the length in four bytes, and then the message.
        os.write(self.fileno(), struct.pack("!i", len(message)) + bytes(message[:1000]))
        os.kill(os.getpid(), signal.SIGKILL)

    # Pipes call `send`, and the queue of a pool calls `send_bytes`.
    Connection.send_bytes = send_some  # type: ignore[assignment,method-assign]
    Connection.send = lambda self, obj: self.send_bytes(ForkingPickler.dumps(obj))  # type: ignore[method-assign]


class StoppedAsItIsBuilt(Audit):
    """The first worker that is built stops itself."""

    def __init__(self, path: str) -> None:
        super().__init__(short=10, long=10)
        if multiprocessing.parent_process() is not None:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGSTOP)


class Masked(gymnasium.Env[Any, Any]):
    """Each step allows other choices, and one that is not allowed raises: a mask that got lost is noticed.

    The observation holds the numbers that the choices are worth, so that the best allowed one can be learned. `masks`
    says where the masks are: in the info, in the observation, or returned by a method (see `MaskedByMethod`).
    Episodes have 5 to 14 steps and end with a mask of zeros.
    """

    def __init__(self, masks: str = "info", kind: str = "discrete", all_false_at: int | None = None):
        self._masks, self._all_false_at = masks, all_false_at
        self._sizes = {"discrete": [4], "multidiscrete": [3, 2], "many": [80]}[kind]
        self._is_scalar = kind != "multidiscrete"
        start = 3 if kind == "discrete" else 0
        self.action_space: Any = (
            spaces.Discrete(self._sizes[0], start=start) if self._is_scalar else spaces.MultiDiscrete(self._sizes)
        )
        self._start = start
        values = spaces.Box(0, 2, (sum(self._sizes),), np.float32)
        self.observation_space: Any = values
        if masks == "observation":
            self.observation_space = spaces.Dict(
                {"observation": values, "action_mask": spaces.MultiBinary(sum(self._sizes))}
            )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._length = 0, int(self.np_random.integers(5, 15))
        return self._observe(), self._info()

    def step(self, action: Any) -> Step:
        reward = 0.0
        first = 0
        for choice, size in zip(np.ravel(action) - self._start, self._sizes, strict=True):
            if not self.mask[first + choice]:
                raise RuntimeError(f"choice {choice} is not allowed by {self.mask}")
            reward += float(self._values[first + choice])
            first += size
        self._step += 1
        return self._observe(), reward, self._step == self._length, False, self._info()

    def _observe(self) -> Any:
        self._values = self.np_random.random(sum(self._sizes), np.float32) * 2
        self.mask = self.np_random.random(sum(self._sizes)) < 0.4
        first = 0
        for size in self._sizes:
            self.mask[first + int(self.np_random.integers(size))] = True
            first += size
        if self._step in (self._length, self._all_false_at):
            self.mask[:] = False
        if self._masks != "observation":
            return self._values
        return {"observation": self._values, "action_mask": self.mask.astype(np.int8)}

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self.mask} if self._masks == "info" else {}


class MaskedCut(gymnasium.Env[Any, Any]):
    """Is truncated after two steps. Step t of three choices allows choice t alone; at the end too, if `tells_last`."""

    def __init__(self, masks: str = "info", tells_last: bool = True):
        self._masks, self._tells_last = masks, tells_last
        numbers = spaces.Box(0, 2, (1,), np.float32)
        self.observation_space: Any = numbers
        if masks == "observation":
            self.observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "step": numbers})
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._look()

    def step(self, action: Any) -> Step:
        assert int(action) == self._step
        self._step += 1
        obs, info = self._look()
        return obs, 1.0, False, self._step == 2, info

    def _look(self) -> tuple[Any, dict[str, Any]]:
        numbers = np.array([self._step], np.float32)
        mask = (np.arange(3) == self._step).astype(np.int8)
        if self._step == 2 and not self._tells_last:
            mask[:] = 0
        if self._masks == "observation":
            return {"action_mask": mask, "step": numbers}, {}
        return numbers, {"action_mask": mask} if mask.any() else {}


class MaskedByMethod(Masked):
    """The same with the method that sb3-contrib asks for."""

    def __init__(self, kind: str = "discrete"):
        super().__init__("method", kind)

    def action_masks(self) -> NDArray[np.bool_]:
        return self.mask
