"""Environments and a policy on one device, turned into segments that never leave it; and episodes for evaluation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from freerun.core import (
    Acceleration,
    EnvFailure,
    FloatArray,
    MemoryTensorActor,
    Policy,
    TensorActor,
    TensorEnv,
    TensorSegment,
    as_memory_policy,
    empty_memory,
)
from freerun.cuda_graphs import GraphedStep, fused
from freerun.transport.heartbeats import Heartbeat


class TensorRollout:
    """Steps N environments that are tensors, `num_steps` steps at a time.

    Where the environment allows it, all steps of a segment are recorded as one CUDA graph. The host then launches one
    graph per segment instead of some hundred kernels per step.
    """

    def __init__(
        self,
        env: TensorEnv,
        actor: TensorActor,
        num_steps: int,
        acceleration: Acceleration = "auto",
        worker: int = 0,
    ):
        self.env = env
        self._worker = worker
        self._actor = actor
        self._version = -1
        self._num_segments = 0
        self.heartbeat = Heartbeat()
        self._device = env.device
        space, action_space = env.spec.observation_space, env.spec.action_space
        discrete = not isinstance(action_space, spaces.Box)
        num_envs = env.num_envs

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((num_steps, num_envs, *shape), dtype=dtype, device=self._device)

        # A graph replays with the addresses that it was recorded with, so every tensor that it writes stays in place.
        self._buffer = TensorSegment(
            obs=zeros(*space.shape),
            action=zeros(*(action_space.shape or ()), dtype=torch.int64 if discrete else torch.float32),
            log_prob=zeros(),
            reward=zeros(),
            terminated=zeros(dtype=torch.bool),
            truncated=zeros(dtype=torch.bool),
            next_obs=zeros(*space.shape),
            episode_return=zeros(),
            episode_length=zeros(dtype=torch.int64),
            version=-1,
            seconds=0.0,
        )
        self._memory = None
        if isinstance(actor, MemoryTensorActor):
            self._act_from = actor.act_from
            self._memory, self._buffer.memory = torch.zeros((2, num_envs, actor.memory_size), device=self._device)
        self._return = torch.zeros(num_envs, device=self._device)
        self._length = torch.zeros(num_envs, dtype=torch.int64, device=self._device)
        self._obs = env.reset().clone()
        chosen = _choose(acceleration, env)
        self._stream = _choose_stream(self._device, chosen)
        self._step = fused(env.step, chosen)
        self._play = GraphedStep(self._play_segment, self._device, (actor.generator,), chosen)

    def load(self, weights: FloatArray, version: int) -> None:
        if version != self._version:
            with torch.cuda.stream(self._stream):
                self._actor.load(weights)
            self._version = version

    def reset(self) -> None:
        """Give up all episodes and begin new ones."""
        with torch.cuda.stream(self._stream):
            self._obs.copy_(self.env.reset())
            for running in (self._return, self._length, self._memory):
                if running is not None:
                    running.zero_()

    @property
    def num_segments(self) -> int:
        """The number that the next segment will have."""
        return self._num_segments

    def evaluate(self, policy: Policy, num_episodes: int) -> list[float]:
        """Play new episodes with another policy, whose returns these are; afterwards give all up and begin new ones."""
        with torch.cuda.stream(self._stream):
            returns, _ = play_tensors(self.env, policy, 0, num_episodes, self.heartbeat.beat)
        self.env.metrics()  # what the simulator has logged meanwhile says nothing about the training
        self.reset()
        return returns

    def collect(self) -> TensorSegment:
        """Make the next steps of all environments. Any stream may use the segment that this returns."""
        started_at = time.perf_counter()
        try:
            with torch.cuda.stream(self._stream):
                self._play(1)
                # The next segment overwrites the buffer, while the learner may still use this one.
                copies: dict[str, Any] = {
                    name: value.clone() for name, value in vars(self._buffer).items() if isinstance(value, Tensor)
                }
            if self._stream is not None:
                # The learner's stream knows nothing of this one: wait until the copies are complete.
                self._stream.synchronize()
        except Exception as error:
            raise EnvFailure(f"the simulator failed in a step: {type(error).__name__}: {error}") from error
        seconds, number = time.perf_counter() - started_at, self._num_segments
        self._num_segments += 1
        return TensorSegment(**copies, version=self._version, seconds=seconds, worker=self._worker, number=number)

    @torch.no_grad()
    def _play_segment(self) -> None:
        """All steps of one segment. It only writes tensors in place, because it may be recorded as a CUDA graph."""
        buffer = self._buffer
        if self._memory is not None and buffer.memory is not None:
            buffer.memory.copy_(self._memory)
        for row in range(len(buffer.reward)):
            self.heartbeat.beat()  # a replayed graph runs no Python, so the watch sees whole segments
            action, log_prob = self._choose_actions()
            buffer.obs[row].copy_(self._obs)
            buffer.action[row].copy_(action.reshape(buffer.action[row].shape))
            buffer.log_prob[row].copy_(log_prob)
            obs, final_obs, reward, terminated, truncated = self._step(action)
            buffer.reward[row].copy_(reward)
            buffer.terminated[row].copy_(terminated)
            buffer.truncated[row].copy_(truncated)
            ended = buffer.terminated[row] | buffer.truncated[row]
            if not self.env.spec.reports_final_obs:
                # The observation before the last step is the nearest known one to the hidden final observation.
                shape = (-1, *[1] * (obs.dim() - 1))
                final_obs = torch.where(ended.view(shape), self._obs, final_obs)
            buffer.next_obs[row].copy_(final_obs)
            self._return += buffer.reward[row]
            self._length += 1
            buffer.episode_return[row].copy_(self._return)
            buffer.episode_length[row].copy_(self._length)
            self._return.masked_fill_(ended, 0.0)
            self._length.masked_fill_(ended, 0)
            if self._memory is not None:
                self._memory.masked_fill_(ended[:, None], 0.0)
            self._obs.copy_(obs)

    def _choose_actions(self) -> tuple[Tensor, Tensor]:
        return self._actor.act(self._obs) if self._memory is None else self._act_from(self._obs, self._memory)


def make_rollouts(
    envs: Sequence[TensorEnv], policy: Policy, seed: int, num_steps: int, acceleration: Acceleration
) -> list[TensorRollout]:
    """A rollout for each of several simulators, which sample with seeds of their own."""
    return [
        TensorRollout(env, policy.on(env.device, seed + worker), num_steps, acceleration, worker)
        for worker, env in enumerate(envs)
    ]


def keep_for_current_stream(segment: TensorSegment) -> None:
    """Let the stream of this thread read a segment whenever it comes to it.

    The memory was allocated on the simulator's stream. Without this, freeing it would let the simulator reuse it while
    kernels of this stream that read it are still queued.
    """
    if segment.reward.is_cuda:
        for value in vars(segment).values():
            if isinstance(value, Tensor):
                value.record_stream(torch.cuda.current_stream(value.device))


def _choose(acceleration: Acceleration, env: TensorEnv) -> Acceleration:
    """`auto` records graphs but does not fuse kernels, which takes half a minute before the first step."""
    if not env.is_capturable or env.device.type != "cuda":
        return "none"
    return "graph" if acceleration == "auto" else acceleration


def _choose_stream(device: torch.device, acceleration: Acceleration) -> torch.cuda.Stream | None:
    """The CUDA stream that the simulator's kernels are launched on; None on a CPU.

    A recorded simulator gets a stream of high priority (-1): its kernels are small and go before the learner's large
    ones, so that neither waits long. A simulator that is not recorded may use streams of its own, so it stays on the
    stream that it was made on.
    """
    if device.type != "cuda":
        return None
    if acceleration == "none":
        return torch.cuda.current_stream(device)
    own = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream(device))  # where the environment and the buffer were made
    return own


def play_tensors(
    env: TensorEnv,
    policy: Policy,
    seed: int,
    num_episodes: int | None = None,
    each_step: Callable[[], None] = lambda: None,
) -> tuple[list[float], list[int]]:
    """Play the first episode of so many environments, or of every one; return the episodes' returns and lengths.

    Only the first counts: the N episodes that end earliest would be mostly short ones, and so a biased sample.
    """
    rng = np.random.default_rng(seed)
    total, length = np.zeros(env.num_envs), np.zeros(env.num_envs, int)
    is_running = np.ones(env.num_envs, bool)
    # Simulators may cut the first episodes short after a reset, so that not all end at once (docs/tensors.md).
    obs = getattr(env, "begin_whole_episodes", env.reset)()
    act, memory = policy.act, empty_memory(policy, env.num_envs)
    if (remembering := as_memory_policy(policy)) is not None and memory is not None:
        # Only first episodes count, so no memory need be emptied.
        act = functools.partial(remembering.act_from, memory=memory)
    while is_running[:num_episodes].any():
        each_step()
        noise = policy.draw(rng, env.num_envs)
        action = torch.from_numpy(act(obs.cpu().numpy(), noise).action).to(env.device)
        try:
            obs, _, reward, terminated, truncated = env.step(action)
        except Exception as error:
            raise EnvFailure(f"the simulator failed in a step: {type(error).__name__}: {error}") from error
        total += np.where(is_running, reward.cpu().numpy(), 0.0)
        length += is_running
        is_running &= ~(terminated | truncated).cpu().numpy()
    return total[:num_episodes].tolist(), length[:num_episodes].tolist()
