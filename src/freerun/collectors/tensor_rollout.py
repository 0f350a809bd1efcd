"""Environments on a device and a policy beside them, turned into segments that never leave it."""

from __future__ import annotations

import time

import torch
from gymnasium import spaces
from torch import Tensor

from freerun.capture import Repeated, fused
from freerun.core import Acceleration, EnvFailure, FloatArray, TensorActor, TensorEnv, TensorSegment
from freerun.transport.pulse import Vitals


class TensorRollout:
    """With `rollout.py` and `solo.py`, the only caller of `env.step` in a run.

    All steps of a segment are one CUDA graph where the environment allows: the host then launches once instead of some
    hundred times a step.
    """

    def __init__(self, env: TensorEnv, actor: TensorActor, num_steps: int, acceleration: Acceleration = "auto"):
        self.env = env
        self._actor = actor
        self._version = -1
        self.vitals = Vitals()
        self._device = env.device
        space, action_space = env.spec.observation_space, env.spec.action_space
        discrete = not isinstance(action_space, spaces.Box)
        num_envs = env.num_envs

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((num_steps, num_envs, *shape), dtype=dtype, device=self._device)

        self._record = TensorSegment(
            obs=room(*space.shape),
            action=room(*(action_space.shape or ()), dtype=torch.int64 if discrete else torch.float32),
            log_prob=room(),
            reward=room(),
            terminated=room(dtype=torch.bool),
            truncated=room(dtype=torch.bool),
            next_obs=room(*space.shape),
            episode_return=room(),
            episode_length=room(dtype=torch.int64),
            version=-1,
            seconds=0.0,
        )
        self._return = torch.zeros(num_envs, device=self._device)
        self._length = torch.zeros(num_envs, dtype=torch.int64, device=self._device)
        self._obs = env.reset().clone()
        chosen = _choose(acceleration, env)
        self._stream = _stream(self._device, chosen)
        self._step = fused(env.step, chosen)
        self._run = Repeated(self._play, self._device, (actor.generator,), chosen)

    def load(self, weights: FloatArray, version: int) -> None:
        if version != self._version:
            with torch.cuda.stream(self._stream):
                self._actor.load(weights)
            self._version = version

    def begin_anew(self) -> None:
        """All episodes are given up."""
        with torch.cuda.stream(self._stream):
            self._obs.copy_(self.env.reset())
            self._return.zero_()
            self._length.zero_()

    def collect(self) -> TensorSegment:
        """The next steps of all environments. They are there when this returns, on whatever stream they are used."""
        started = time.perf_counter()
        try:
            with torch.cuda.stream(self._stream):
                self._run(1)
                copies = {
                    name: value.clone() for name, value in vars(self._record).items() if isinstance(value, Tensor)
                }
            if self._stream is not None:
                self._stream.synchronize()
        except Exception as error:
            raise EnvFailure(f"the simulator failed in a step: {type(error).__name__}: {error}") from error
        return TensorSegment(**copies, version=self._version, seconds=time.perf_counter() - started)

    @torch.no_grad()
    def _play(self) -> None:
        record = self._record
        for row in range(len(record.reward)):
            self.vitals.beat()
            action, log_prob = self._actor.act(self._obs)
            record.obs[row].copy_(self._obs)
            record.action[row].copy_(action.reshape(record.action[row].shape))
            record.log_prob[row].copy_(log_prob)
            obs, final_obs, reward, terminated, truncated = self._step(action)
            record.reward[row].copy_(reward)
            record.terminated[row].copy_(terminated)
            record.truncated[row].copy_(truncated)
            ended = record.terminated[row] | record.truncated[row]
            if not self.env.spec.reports_final_obs:  # the last one that was seen is the nearest thing to it
                shape = (-1, *[1] * (obs.dim() - 1))
                final_obs = torch.where(ended.view(shape), self._obs, final_obs)
            record.next_obs[row].copy_(final_obs)
            self._return += record.reward[row]
            self._length += 1
            record.episode_return[row].copy_(self._return)
            record.episode_length[row].copy_(self._length)
            self._return.masked_fill_(ended, 0.0)
            self._length.masked_fill_(ended, 0)
            self._obs.copy_(obs)


def _choose(acceleration: Acceleration, env: TensorEnv) -> Acceleration:
    """To fuse the simulator's kernels takes half a minute before the first step: only where it is asked for."""
    if not env.is_capturable or env.device.type != "cuda":
        return "none"
    return "graph" if acceleration == "auto" else acceleration


def _stream(device: torch.device, acceleration: Acceleration) -> torch.cuda.Stream | None:
    """Its kernels are small and go before the learner's, which are large: so neither has to wait long.

    What is not recorded may use streams of its own: it stays on the one that it began with.
    """
    if device.type != "cuda":
        return None
    if acceleration == "none":
        return torch.cuda.current_stream(device)
    own = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream(device))
    return own
