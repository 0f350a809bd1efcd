"""Your own mode: many environments in this process, stepped one after another, as SB3's DummyVecEnv does.

python examples/own_mode.py
PYTHONPATH=examples freerun train CartPole-v1 --mode own_mode:InThisProcess --num-workers 8
"""

from __future__ import annotations

import freerun
from freerun.collecting.modes.inline_collector import InlineCollector
from freerun.core import CollectorSettings, EnvFactory, ModeTraits, Pacing, Policy, WorkerLocation


class InThisProcess(InlineCollector):
    """As many environments as workers, without a process of their own: for very quick ones, on one core.

    `InlineCollector` collects and learns in turns over any vector of environments. It has `publish`, `collect`,
    `counts` and `close`, which is all that a mode must have.
    """

    traits = ModeTraits(workers=WorkerLocation.THIS_PROCESS, pacing=Pacing.TAKES_TURNS)  # so there is never any lag

    def __init__(self, factory: EnvFactory, policy: Policy, settings: CollectorSettings):
        super().__init__(lambda: factory.make(settings.num_workers), policy, settings)


def main() -> None:
    result = freerun.train("CartPole-v1", mode=InThisProcess, num_workers=8, total_steps=20_000)
    print(f"mean return {result.summary['mean_return']:.1f}")


if __name__ == "__main__":
    main()
