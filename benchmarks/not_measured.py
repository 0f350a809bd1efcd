"""Numbers of README.md and docs/ that look measured and are not: phrases of each page, by why they may stand there."""

from __future__ import annotations

LIMIT = "a limit or a threshold in the code"
SETTING = "a setting of the benchmark or of the environment"
DEFAULT = "a default of ours or of another project"
EXAMPLE = "worked out or made up in the text"
NAME = "part of a name"

NOT_MEASURED: dict[str, dict[str, tuple[str, ...]]] = {
    "README.md": {SETTING: ("at 1, 2 or 8 workers",)},
    "adapting.md": {
        LIMIT: (
            *(
                "a queue 16 times as long",
                "at 70 % or more",
                "outside 50–80 %",
                "more than 3 % and",
                "no more than 2 % each",
            ),
            "no more than 5 % below",
        ),
    },
    "bench.md": {LIMIT: ("at least 10 % wide",)},
    "callbacks.md": {LIMIT: ("up to 2 KB as JSON",)},
    "cluster.md": {LIMIT: ("4 at most", "within 20 ms", "larger than 100 KB")},
    "cyber.md": {NAME: ("CAGE challenge 2",)},
    "defaults.md": {SETTING: ("mean return of 20 episodes",)},
    "dqn.md": {SETTING: ("all five seeds reach 475",)},
    "faults.md": {
        LIMIT: (
            *(
                "60 s and more without a start",
                "after 0.1 s, 0.2 s, 0.4 s … up to 5 s",
                "fails 3 times",
                "longer than 5 s",
            ),
            *("is left within 5 s", "to 95 % within 5 s of a kill and 5 s +", "waits up to 5 s before it starts"),
        ),
        EXAMPLE: ("7 s so far",),
        SETTING: ("200 SIGKILLs",),
    },
    "federated.md": {SETTING: ("4,000 episodes per site", "2,000 episodes per site", "seeds from 100 on")},
    "images.md": {
        SETTING: ("84 × 84 × 4 bytes", "after 60,000 steps", "After 150,000 steps of Breakout"),
    },
    "isaac.md": {SETTING: ("An episode returns 5 at most", "mean return of 4.5:")},
    "lag.md": {SETTING: ("lag 1 and 4",)},
    "learners.md": {SETTING: ("minibatches of 64 they", "512-512 and 2,048 they")},
    "mbpo.md": {DEFAULT: ("5 % real steps",), LIMIT: ("gains 1 % on them",), SETTING: ("after 100 updates",)},
    "memory.md": {
        SETTING: ("after 150,000 steps", "after 60,000 steps"),
        NAME: ("CAGE challenge 2",),
    },
    "metrics.md": {EXAMPLE: ("0.1 is 10 % more",)},
    "modes.md": {EXAMPLE: ("0.9⁴ = 66 %",)},
    "own_environment.md": {SETTING: ("after 30,000 steps",)},
    "pacing.md": {DEFAULT: ("(MBPO: 1)",)},
    "probe.md": {LIMIT: ("256 times as many", "within 3 % of it, ", "within 3 % of its fastest")},
    "queues.md": {LIMIT: ("more than 20 % longer",)},
    "scaling.md": {
        SETTING: (
            *("simulates 10, 100, 1,000 and 10,000 workers", "takes 10 ms per step", "episodes of 100 steps"),
            *("observations of 52 numbers", "has 10 Gbit/s"),
        ),
        LIMIT: ("near 1, workers wait",),
    },
    "simulators.md": {
        SETTING: (
            *("Every 5 seconds of traffic", "than 5 seconds before", "case 14 with 14 substations and 20 lines"),
            *("after a change: 3, as", "(0 is grid2op's own default", "should stay 1: others", "up to 575 later"),
            "rests for 10 steps",
        ),
    },
    "speed.md": {
        SETTING: (
            *("a step takes 10 ms on average and up to 50", "` 64. Systems whose", "have 2 processes for those"),
            *("within 50,000 real steps", "within 100,000,"),
        ),
    },
    "sweeps.md": {LIMIT: ("10, 30 and 90 %", "before 30 %"), SETTING: ("the same 30 short trials",)},
    "tensors.md": {
        SETTING: (
            *("costs 0.05 · v²", "0.5 · v at most, so 5 m/s", "is 0.1 for each", "collects 24 steps", "next 24 steps"),
            *("hover, 24 steps", "million with 65,536", "% with 4)", "hover at a return of 99"),
        ),
        EXAMPLE: ("return of 19 is",),
    },
    "watching.md": {
        LIMIT: (
            *("Spans under 10 ms", "at most 100 a second", "| 50–80 % |", "| 70–90 % |", "above 90 %", "above 80 %"),
            "95 % confidence interval",
        ),
    },
    "workflow_search.md": {SETTING: ("replayed 200 searches",)},
}
