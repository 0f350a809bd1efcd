"""PPO that looks at every step it is given: none torn, none of another episode, none twice.

`python -m audited_ppo train sealed_env:Sealed --algo audited-ppo …` is `freerun train` with it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from sealed_env import read_seal

from freerun.algorithms.ppo.ppo import PPO
from freerun.core import Metrics, episode_seed
from freerun.settings import registry
from freerun.tools.cli import main as cli


class AuditedPPO(PPO):
    def __init__(self, env: Any, config: Any, seed: int, *rest: Any):
        super().__init__(env, config, seed, *rest)
        self._run_seed = seed
        self._num_audited = 0
        self._seen: defaultdict[int, int] = defaultdict(int)  # steps of each episode, as bits

    def observe(self, segments: Sequence[Any]) -> None:
        for segment in segments:
            self._audit(segment)
        super().observe(segments)

    def _audit(self, segment: Any) -> None:
        numbers = segment.episode.ravel()
        seeds, steps = read_seal(segment.obs.reshape(numbers.size, -1))
        next_seeds, next_steps = read_seal(segment.next_obs.reshape(numbers.size, -1))
        expected = np.array([episode_seed(self._run_seed, int(number)) for number in numbers])
        assert (seeds == expected).all(), "a step of another episode"
        assert (next_seeds == seeds).all(), "a successor of another episode"
        assert (next_steps == steps + 1).all(), "a successor of another step"
        assert (segment.reward.ravel() == next_steps).all(), "a reward of another step"
        for number, step in zip(numbers.tolist(), steps.tolist(), strict=True):
            assert not self._seen[number] >> step & 1, f"step {step} of episode {number} came twice"
            self._seen[number] |= 1 << step
        self._num_audited += numbers.size

    def update(self, version: int, progress: float) -> Metrics:
        return {**super().update(version, progress), "audited_steps": float(self._num_audited)}


ENTRY = registry.AlgorithmEntry(
    "audited_ppo:AuditedPPO", "freerun.algorithms.ppo.ppo_config:PPOConfig", "PPO that audits its data"
)


def main() -> int:
    registry.ALGORITHMS["audited-ppo"] = ENTRY
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
