"""Isaac Lab in another process, as a process can simulate only once: for all collectors but the first.

What a step takes and gives lies in memory that both processes share (a GPU's, if that is where it is simulated); only a
word goes through the pipe. Nothing here imports torch before Isaac Sim has had its turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from freerun.core import EnvFailure, EnvSpec, Metrics, TensorStep, UserError
from freerun.envs import isaac_launch
from freerun.transport import processes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GRACE_SECONDS = 10.0


class IsaacLabProcess:
    """A `core.TensorEnv` whose steps are taken elsewhere."""

    is_capturable = False
    is_elsewhere = True

    def __init__(self, task: str, num_envs: int | None, device: str, seed: int, headless: bool = True, **settings: Any):
        import torch.multiprocessing  # teaches pipes to carry tensors

        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._task, self._is_closed = task, False
        self._lock = threading.Lock()  # the learner's thread asks for metrics
        arguments = (theirs, task, num_envs, device, seed, headless, settings)
        self._process = context.Process(target=_serve, args=arguments, daemon=True, name="freerun-isaac-lab")
        with processes.without_main():
            self._process.start()
        theirs.close()
        self.spec: EnvSpec
        self.num_envs: int
        self._parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
        self.spec, self.num_envs, where, self._action, self._parts = self._answer()
        self.device = torch.device(where)

    def reset(self) -> Tensor:
        self._ask("reset")
        return self._parts[0]

    def step(self, action: Tensor) -> TensorStep:
        self._action.copy_(action.view_as(self._action))
        _finish(self._action)
        self._ask("step")
        return TensorStep(*self._parts)

    def metrics(self) -> Metrics:
        found: Metrics = self._ask("metrics")
        return found

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pipe.close()  # which it takes for goodbye
            processes.stop([self._process], GRACE_SECONDS)

    def _ask(self, what: str) -> Any:
        with self._lock:
            try:
                self._pipe.send(what)
            except OSError:
                raise self._death() from None
            return self._answer()

    def _answer(self) -> Any:
        try:
            outcome, content = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if outcome == "done":
            return content
        self.close()
        raise (
            UserError(content)
            if outcome == "refused"
            else EnvFailure(f"{self._task} failed in its process:\n{content}")
        )

    def _death(self) -> EnvFailure:
        self.close()
        return EnvFailure(f"the process that simulated {self._task} has died (exit code {self._process.exitcode})")


def _serve(
    pipe: Connection, task: str, num_envs: int | None, device: str, seed: int, headless: bool, settings: dict[str, Any]
) -> None:
    """The life of the other process."""
    processes.enter_worker()
    try:
        isaac_launch.start_app(device, headless)
        _simulate(pipe, task, num_envs, device, seed, headless, settings)
    except (EOFError, OSError):
        pass  # nobody is listening any more
    except UserError as error:
        pipe.send(("refused", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))
    isaac_launch.stop(0)


def _simulate(
    pipe: Connection, task: str, num_envs: int | None, device: str, seed: int, headless: bool, settings: dict[str, Any]
) -> None:
    import torch.multiprocessing
    from gymnasium import spaces

    from freerun.envs.isaac_lab import make_here

    env = make_here(task, num_envs, device, seed, headless, **settings)
    obs_space, action_space = env.spec.observation_space, env.spec.action_space

    def room(shape: tuple[int, ...] | None = (), dtype: torch.dtype = torch.float32) -> Tensor:
        found = torch.zeros((env.num_envs, *(shape or ())), dtype=dtype, device=env.device)
        found.share_memory_()  # type: ignore[no-untyped-call]
        return found

    action = room(action_space.shape, torch.float32 if isinstance(action_space, spaces.Box) else torch.int64)
    parts = room(obs_space.shape), room(obs_space.shape), room(), room(dtype=torch.bool), room(dtype=torch.bool)

    def answer(asked: str) -> Metrics | None:
        if asked == "metrics":
            return env.metrics()
        results = [env.reset()] if asked == "reset" else list(env.step(action))
        for part, result in zip(parts, results, strict=False):
            part.copy_(result)
        _finish(action)
        return None

    with contextlib.closing(env):
        with processes.lending():
            pipe.send(("done", (env.spec, env.num_envs, str(env.device), action, parts)))
            asked = pipe.recv()
        while True:
            pipe.send(("done", answer(asked)))
            asked = pipe.recv()


def _finish(tensor: Tensor) -> None:
    """What was written is there: the other process has a stream of its own."""
    if tensor.is_cuda:
        import torch

        torch.cuda.current_stream(tensor.device).synchronize()
