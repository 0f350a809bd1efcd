"""Isaac Lab in another process, for all collectors but the first: a process can simulate only once.

Actions and results lie in memory that both processes share, on the GPU if the simulation runs there. Only commands and
"done" go through the pipe. Nothing here imports torch before Isaac Sim is loaded.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from freerun.adapters import isaac_launch
from freerun.core import EnvFailure, EnvSpec, Metrics, TensorStep, UserError
from freerun.transport import processes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GRACE_SECONDS = 10.0
"""How long the other process may take to end by itself."""


class IsaacLabProcess:
    """A `core.TensorEnv` whose steps are made in another process."""

    is_capturable = False
    is_elsewhere = True

    def __init__(self, task: str, num_envs: int | None, device: str, seed: int, headless: bool = True, **settings: Any):
        import torch.multiprocessing  # makes pipes able to send tensors as handles of shared memory

        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._task, self._is_closed = task, False
        # The learner's thread asks for metrics while another thread steps: one request and its answer at a time.
        self._lock = threading.Lock()
        arguments = (theirs, task, num_envs, device, seed, headless, settings)
        # A daemon, so that it is ended with this process.
        self.process = context.Process(target=_serve, args=arguments, daemon=True, name="freerun-isaac-lab")
        """The process that simulates."""
        with processes.without_main():
            self.process.start()
        # With a copy of its end open here, the pipe would not report the death of the other process.
        theirs.close()
        self.spec: EnvSpec
        self.num_envs: int
        self._results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
        self.spec, self.num_envs, where, self._action, self._results = self._answer()
        self.device = torch.device(where)

    def reset(self) -> Tensor:
        self._request("reset")
        return self._results[0]

    def step(self, action: Tensor) -> TensorStep:
        self._action.copy_(action.view_as(self._action))
        _wait_for_writes(self._action)
        self._request("step")
        return TensorStep(*self._results)

    def metrics(self) -> Metrics:
        found: Metrics = self._request("metrics")
        return found

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pipe.close()  # the other process reads the end of the file and ends
            processes.stop([self.process], GRACE_SECONDS)

    def _request(self, what: str) -> Any:
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
        return EnvFailure(f"the process that simulated {self._task} has died (exit code {self.process.exitcode})")


def _serve(
    pipe: Connection, task: str, num_envs: int | None, device: str, seed: int, headless: bool, settings: dict[str, Any]
) -> None:
    """What the other process runs."""
    processes.enter_worker()
    try:
        isaac_launch.start_app(device, headless)
        _simulate(pipe, task, num_envs, device, seed, headless, settings)
    except (EOFError, OSError):
        pass  # the first process has closed the pipe
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

    from freerun.adapters.isaac_lab import make_here

    env = make_here(task, num_envs, device, seed, headless, **settings)
    obs_space, action_space = env.spec.observation_space, env.spec.action_space

    def shared(shape: tuple[int, ...] | None = (), dtype: torch.dtype = torch.float32) -> Tensor:
        tensor = torch.zeros((env.num_envs, *(shape or ())), dtype=dtype, device=env.device)
        tensor.share_memory_()  # type: ignore[no-untyped-call]
        return tensor

    action = shared(action_space.shape, torch.float32 if isinstance(action_space, spaces.Box) else torch.int64)
    # In the order of a `TensorStep`: obs, final_obs, reward, terminated, truncated.
    results = (
        shared(obs_space.shape),
        shared(obs_space.shape),
        shared(),
        shared(dtype=torch.bool),
        shared(dtype=torch.bool),
    )

    def answer(request: str) -> Metrics | None:
        if request == "metrics":
            return env.metrics()
        new = [env.reset()] if request == "reset" else list(env.step(action))
        # Not strict: a reset has new observations alone, which are the first of the results.
        for result, value in zip(results, new, strict=False):
            result.copy_(value)
        _wait_for_writes(action)
        return None

    with contextlib.closing(env):
        with processes.resource_sharing():
            pipe.send(("done", (env.spec, env.num_envs, str(env.device), action, results)))
            request = pipe.recv()
        while True:
            pipe.send(("done", answer(request)))
            request = pipe.recv()


def _wait_for_writes(tensor: Tensor) -> None:
    """Wait until all writes to the GPU are complete: the other process reads on another stream."""
    if tensor.is_cuda:
        import torch

        torch.cuda.current_stream(tensor.device).synchronize()
