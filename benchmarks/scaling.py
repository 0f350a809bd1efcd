"""Ten workers or ten thousand: what each message and byte costs here, and where a cluster would saturate.

- `measure`: processor time of the learner's process per segment and per byte, in modes `freerun` and `ray`; of Ray's
  own processes; of putting weights; of a PPO update per step; of a sum over two learners, and of their updates.
- `simulate`: these costs in a discrete-event simulation of 10 to 10,000 workers. Every worker plays episodes of
  Straggler's kind; results pass the network, the object store and the thread that receives them; the learner updates
  when a round is complete, and --max-lag 1 says how far workers may go ahead. Which of them is busy all the time?

What is assumed and not measured is in `Cluster`.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro
from run_file import ResultFile, write_report

from freerun.tools.bench.load_meter import processor

WORKERS = (10, 100, 1_000, 10_000)
SMALL_STEPS, LARGE_STEPS = 16, 8192
WEIGHTS_BYTES = (70_000, 2_000_000, 20_000_000)
GRADIENT_FLOATS = (10_000, 1_000_000)
UPDATES: dict[str, dict[str, Any]] = {
    "64-64, minibatches of 64": {"minibatch_size": 64},
    "64-64, minibatches of 2,048": {"minibatch_size": 2048},
    "512-512, minibatches of 2,048": {"minibatch_size": 2048, "hidden_sizes": (512, 512)},
}
RESULT = "scaling.json"


@dataclass(frozen=True)
class Options:
    what: tuple[str, ...] = ("measure", "simulate")
    """Parts to run; a simulation takes the costs from scaling.json."""
    seconds: float = 60.0
    """Simulated time (or twenty updates, if they take longer), half of it to warm up."""
    messages: int = 300
    """Segments measured in each case."""
    output: Path = Path(__file__).parent / "results" / "scaling"
    """Folder for scaling.json and scaling.md."""


@dataclass(frozen=True)
class Costs:
    """Seconds, of one core: a + b · bytes. Measured."""

    freerun_message: float
    freerun_byte: float
    ray_message: float
    """In the learner's process."""
    ray_byte: float
    store_message: float
    """In Ray's own processes on the learner's machine."""
    store_byte: float
    publish: float
    """`ray.put` of weights."""
    publish_byte: float
    update_step: float
    """PPO, 64-64, four epochs in minibatches of 256, one thread."""
    sum_call: float
    """Over two learners on this machine."""
    sum_byte: float


@dataclass(frozen=True)
class Cluster:
    """What a run looks like. Assumed."""

    workers: int
    step_seconds: float = 0.010
    """Mean; log-normal, as Straggler's."""
    episode_steps: int = 100
    step_bytes: int = 440
    """Two observations of 52 numbers, and the rest."""
    weights_bytes: int = 70_000
    workers_per_node: int = 64
    network_bytes_per_second: float = 1.25e9
    """The learner's link: 10 Gbit/s."""
    max_lag: int = 1
    learners: int = 1
    update_speed: float = 1.0
    """Times the core that was measured."""
    segments_per_message: int = 1
    """Episodes handed over together, by workers with several environments."""

    @property
    def round_messages(self) -> int:
        """One from every worker, and 2,048 steps at least."""
        return max(self.workers, -(-2048 // (self.episode_steps * self.segments_per_message)))


# ---------------------------------------------------------------------------------------------- what things cost


def linear(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """(bytes, seconds) twice -> seconds per message, seconds per byte."""
    per_byte = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
    return max(0.0, small[1] - per_byte * small[0]), per_byte


def measure_segments(mode: str, steps: int, messages: int) -> tuple[float, float, float]:
    """Bytes of a segment, and what one costs the learner's process and Ray's."""
    from freerun.adapters.gymnasium_envs import GymnasiumFactory
    from freerun.algorithms.policies.mlp_actor import ActorSpec, MLPActor
    from freerun.core import SEGMENT_ARRAYS, CollectorSettings, Demand, Segment
    from freerun.settings import registry

    factory = GymnasiumFactory("CartPole-v1")
    policy = MLPActor(ActorSpec.of(factory.spec, (8,), "tanh"), scalar_actions=True)
    entry = registry.MODES[mode]
    options: Any = entry.load_config()
    collector = entry.load()(factory, policy, CollectorSettings(2, None, seed=0), options(segment_steps=steps))
    try:
        collector.publish(policy.weights, 0)
        (segment, *_) = collector.collect(Demand(steps=8 * steps))
        assert isinstance(segment, Segment)
        num_bytes = sum(getattr(segment, name).nbytes for name in SEGMENT_ARRAYS)
        before = (time.process_time(), helpers_seconds())
        received = 0
        while received < messages:
            received += len(collector.collect(Demand(steps=8 * steps)))
        after = (time.process_time(), helpers_seconds())
    finally:
        collector.close()
    own, others = ((b - a) / received for a, b in zip(before, after, strict=True))
    return float(num_bytes), own, others


def helpers_seconds() -> float:
    """Of Ray's processes that are no workers."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name() in ("raylet", "gcs_server"):
                used = process.cpu_times()
                total += used.user + used.system
        except psutil.Error:
            continue
    return total


def measure_publish() -> tuple[float, float]:
    import ray

    from freerun.collecting.ray.ray_cluster import connect
    from freerun.collecting.ray.ray_config import RayConfig

    connection = connect(RayConfig(), 1)
    found = []
    try:
        for size in WEIGHTS_BYTES:
            weights = np.zeros(size // 4, np.float32)
            seconds = per_call(lambda weights=weights: ray.put(weights), 20)  # type: ignore[misc]
            found.append((float(weights.nbytes), seconds))
    finally:
        connection.close()
    return linear(found[0], found[-1])


def measure_update(peers: Any = None, width: int = 100, **config: Any) -> float:
    """Seconds of an update per step; of several learners, from as many steps in all."""
    import torch
    from gymnasium import spaces

    from freerun.algorithms.ppo.ppo import PPO
    from freerun.algorithms.ppo.ppo_config import PPOConfig
    from freerun.core import EnvSpec, Segment

    torch.set_num_threads(1)
    spec = EnvSpec(spaces.Box(-1, 1, (52,), np.float32), spaces.Discrete(145))
    settings = PPOConfig(
        **{"normalize_reward": False, "steps_per_update": 1, "num_epochs": 4, "minibatch_size": 256, **config}
    )
    algorithm = PPO(spec, settings, 0, "cpu", False, peers)
    rng = np.random.default_rng(0)
    count = 1 if peers is None else peers.count
    shape = (100, width // count)
    ends = np.zeros(shape, np.bool_)
    ends[-1] = True
    obs = rng.normal(size=(*shape, 52)).astype(np.float32)
    zeros = np.zeros(shape, np.float32)
    numbers = np.zeros(shape, np.int64)
    segment = Segment(
        obs, rng.integers(0, 145, shape), zeros - 5, zeros, np.zeros_like(ends), ends, obs, numbers, numbers, 0.0
    )

    def update() -> None:
        algorithm.observe([segment])
        algorithm.update(0, 0.0)

    return per_call(update, 3) / (segment.num_steps * count)


def per_call(function: Callable[[], Any], repeats: int) -> float:
    """The median, in seconds of the clock."""
    function()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def sum_often(index: int, port: int, server: Any, sink: Any) -> None:
    import torch

    from freerun.transport.learner_place import LearnerPlace
    from freerun.transport.torch_learners import TorchLearnerGroup

    torch.set_num_threads(1)
    peers = TorchLearnerGroup(LearnerPlace(index, 2, "127.0.0.1", port, index, 2), "cpu", server)
    found = []
    for size in GRADIENT_FLOATS:
        tensor = torch.zeros(size)
        found.append((4.0 * size, per_call(lambda tensor=tensor: peers.sum(tensor), 50)))  # type: ignore[misc]
    updates = {name: measure_update(peers, **config) for name, config in UPDATES.items()}
    if index == 0:
        sink.send((found, updates))
    peers.gather(None)
    peers.close()


def measure_two_learners() -> tuple[tuple[float, float], dict[str, float]]:
    """What a sum costs them, and their updates per step."""
    from freerun.transport.torch_learners import listen

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with listen("127.0.0.1") as server:
        port = server.getsockname()[1]
        both = [
            context.Process(target=sum_often, args=(index, port, server if index == 0 else None, there))
            for index in range(2)
        ]
        for process in both:
            process.start()
        sums, updates = here.recv()
        for process in both:
            process.join()
    return linear(*sums), updates


def measure(messages: int) -> tuple[Costs, dict[str, tuple[float, float]]]:
    """All costs, and the time of updates with one learner and with two."""
    found = {}
    for mode in ("freerun", "ray"):
        small, large = (measure_segments(mode, steps, messages) for steps in (SMALL_STEPS, LARGE_STEPS))
        found[mode] = linear(small[:2], large[:2])
        found[f"{mode} helpers"] = linear((small[0], small[2]), (large[0], large[2]))
    sums, of_two = measure_two_learners()
    updates = {name: (measure_update(**config), of_two[name]) for name, config in UPDATES.items()}
    segments = (*found["freerun"], *found["ray"], *found["ray helpers"])
    return Costs(*segments, *measure_publish(), measure_update(), *sums), updates


# ---------------------------------------------------------------------------------------------- the simulation


class Server:
    """Serves one after another."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy: list[tuple[float, float]] = []

    def serve(self, at: float, seconds: float) -> float:
        start = max(at, self.free_at)
        self.free_at = start + seconds
        self.busy.append((start, seconds))
        return self.free_at

    def share(self, since: float, until: float) -> float:
        spent = sum(max(0.0, min(start + seconds, until) - max(start, since)) for start, seconds in self.busy)
        return spent / (until - since)


@dataclass(frozen=True)
class Outcome:
    steps_per_second: float
    efficiency: float
    lag_seconds: float
    """From a message's arrival to the end of the update that learned from it, on average."""
    network: float
    store: float
    receiver: float
    learner: float

    def saturated(self) -> str:
        shares = {
            "network": self.network,
            "object store": self.store,
            "receiver": self.receiver,
            "learner": self.learner,
        }
        full = [name for name, share in shares.items() if share > 0.9]
        return ", ".join(full) or "nothing"


def simulate(costs: Costs, cluster: Cluster, seconds: float, seed: int = 0) -> Outcome:
    rng = np.random.default_rng(seed)
    seconds = max(seconds, 20 * update_seconds(costs, cluster))
    message_steps = cluster.episode_steps * cluster.segments_per_message
    message_bytes = message_steps * cluster.step_bytes
    durations = episode_seconds(rng, cluster)
    network, store, receiver, learner = (Server() for _ in range(4))
    num_nodes = -(-cluster.workers // cluster.workers_per_node)
    events: list[tuple[float, int, int]] = []  # time, 0 = a worker is done, 1 = an update is; whose
    granted, idle = cluster.round_messages * (1 + cluster.max_lag), list(range(cluster.workers))
    num_started = num_arrived = num_trained = 0
    arrivals: list[float] = []
    waits: list[float] = []
    updating = False
    warm, steps_when_warm = seconds / 2, 0
    now = 0.0

    def start_workers() -> None:
        nonlocal num_started
        while idle and num_started < granted:
            num_started += 1
            heapq.heappush(events, (now + next(durations), 0, idle.pop()))

    def update_if_ready() -> None:
        nonlocal updating
        if not updating and num_arrived - num_trained >= cluster.round_messages:
            ready = max(now, arrivals[cluster.round_messages - 1])
            heapq.heappush(events, (learner.serve(ready, update_seconds(costs, cluster)), 1, 0))
            updating = True

    start_workers()
    while events and now < seconds:
        now, kind, worker = heapq.heappop(events)
        if now > warm and not steps_when_warm:
            steps_when_warm = num_trained * message_steps
        if kind == 0:
            sent = network.serve(now, message_bytes / cluster.network_bytes_per_second)
            # Learners receive and store side by side.
            stored = store.serve(sent, (costs.store_message + costs.store_byte * message_bytes) / cluster.learners)
            cost = costs.ray_message + costs.ray_byte * message_bytes
            arrivals.append(receiver.serve(stored, cost / cluster.learners))
            num_arrived += 1
            idle.append(worker)
        else:
            num_trained += cluster.round_messages
            waits += [now - at for at in arrivals[: cluster.round_messages]]
            del arrivals[: cluster.round_messages]
            granted += cluster.round_messages
            learner.serve(now, costs.publish + costs.publish_byte * cluster.weights_bytes)
            network.serve(now, num_nodes * cluster.weights_bytes / cluster.network_bytes_per_second)
            updating = False
        start_workers()
        update_if_ready()
    rate = (num_trained * message_steps - steps_when_warm) / (now - warm)
    shares = [server.share(warm, now) for server in (network, store, receiver, learner)]
    return Outcome(
        rate, rate * cluster.step_seconds / cluster.workers, float(np.mean(waits)) if waits else np.nan, *shares
    )


def episode_seconds(rng: np.random.Generator, cluster: Cluster) -> Iterator[float]:
    """Of so many log-normal steps, whose sum is nearly normal."""
    steps = cluster.episode_steps * cluster.segments_per_message
    sigma = 1.0
    deviation = cluster.step_seconds * np.sqrt((np.exp(sigma**2) - 1) * steps)
    mean = cluster.step_seconds * steps
    while True:
        yield from np.maximum(0.1 * mean, rng.normal(mean, deviation, 4096)).tolist()


def update_seconds(costs: Costs, cluster: Cluster) -> float:
    """Arithmetic is shared out; every gradient step ends in a sum, of 25,000 weights here."""
    steps = cluster.round_messages * cluster.episode_steps * cluster.segments_per_message
    seconds = steps * costs.update_step / (cluster.learners * cluster.update_speed)
    if cluster.learners > 1:
        seconds += 4 * steps / max(256, steps / 64) * (costs.sum_call + costs.sum_byte * 100_000)
    return seconds


VARIANTS: dict[str, dict[str, float]] = {
    "one learner, one core": {},
    "one learner, 20 × as fast (a GPU)": {"update_speed": 20.0},
    "8 learners, 20 × as fast each": {"learners": 8, "update_speed": 20.0},
    "8 learners, 20 × as fast each, 8 episodes a message": {
        "learners": 8,
        "update_speed": 20.0,
        "segments_per_message": 8,
    },
    # 84 × 84 × 4 bytes, before and after a step
    "pictures (56 KB a step), one learner, 20 × as fast": {"update_speed": 20.0, "step_bytes": 56_448},
    "pictures, 8 learners, 20 × as fast each": {"learners": 8, "update_speed": 20.0, "step_bytes": 56_448},
}


MESSAGES: dict[str, Any] = {
    "an episode of 100 steps, 52 numbers (44 KB)": {},
    "8 such episodes (352 KB)": {"segments_per_message": 8},
    "100 steps with pictures (5.6 MB)": {"step_bytes": 56_448},
}


def limits(costs: Costs, cluster: Cluster) -> tuple[float, float, float, float]:
    steps = cluster.episode_steps * cluster.segments_per_message
    size = steps * cluster.step_bytes
    return (
        1 / costs.update_step,
        steps / (costs.ray_message + costs.ray_byte * size),
        steps / (costs.store_message + costs.store_byte * size),
        cluster.network_bytes_per_second / cluster.step_bytes,
    )


def tables(costs: Costs, updates: dict[str, list[float]], seconds: float, machine: str) -> str:
    lines = [
        f"Measured on {machine}; processor time, but for updates and sums (wall clock).",
        "",
        "| | per message | per MB |",
        "| --- | ---: | ---: |",
    ]
    for name, message, byte in (
        ("a segment, mode `freerun`: learner's process", costs.freerun_message, costs.freerun_byte),
        ("a segment, mode `ray`: learner's process", costs.ray_message, costs.ray_byte),
        ("a segment, mode `ray`: Ray's processes", costs.store_message, costs.store_byte),
        ("`ray.put` of weights", costs.publish, costs.publish_byte),
        ("a sum over two learners", costs.sum_call, costs.sum_byte),
    ):
        lines.append(f"| {name} | {1e6 * message:,.0f} µs | {1e3 * 1e6 * byte:,.2f} ms |")
    lines += [
        "",
        f"A PPO update (64-64, four epochs, minibatches of 256): {1e6 * costs.update_step:,.1f} µs a step on one core.",
        "",
        "| 10,000 steps, four epochs | one learner | two learners |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {1e4 * one:.2f} s | {1e4 * two:.2f} s |" for name, (one, two) in updates.items()),
        "",
    ]
    lines += [
        "Steps per second at which each is busy all the time, in mode `ray`:",
        "",
        "| a message | learner, one core | receiver | object store | network |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {name} | {' | '.join(f'{limit:,.0f}' for limit in limits(costs, replace(Cluster(1), **changes)))} |"
            for name, changes in MESSAGES.items()
        ),
        "",
    ]
    for name, changes in VARIANTS.items():
        lines += [
            f"**{name}**",
            "",
            "| workers | steps/s | efficiency | waiting to be learned s | network | object store | receiver | learner "
            "| saturated |",
            "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        ]
        for workers in WORKERS:
            found = simulate(costs, replace(Cluster(workers), **changes), seconds)  # type: ignore[arg-type]
            shares = " | ".join(f"{share:.0%}" for share in (found.network, found.store, found.receiver, found.learner))
            lines.append(
                f"| {workers:,} | {found.steps_per_second:,.0f} | {found.efficiency:.0%} | {found.lag_seconds:.2f} "
                f"| {shares} | {found.saturated()} |"
            )
        lines.append("")
    return "\n".join(lines)


def open_results(folder: Path) -> ResultFile:
    return ResultFile(folder / RESULT, {}, lambda _: ["costs"])


def write_reports(folder: Path) -> str:
    file = open_results(folder)
    found = file.content
    text = tables(Costs(**found["costs"]), found["updates"], Options.seconds, found["machine"])
    return write_report(folder / "scaling.md", text, file.stamped())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if "measure" in options.what:
        machine = f"{os.cpu_count()} cores of {processor()}"
        costs, updates = measure(options.messages)
        file = open_results(options.output)
        file.content = {"machine": machine, "costs": asdict(costs), "updates": updates}
        file.save("costs")
    if "simulate" in options.what:
        print(write_reports(options.output))


if __name__ == "__main__":
    main()
