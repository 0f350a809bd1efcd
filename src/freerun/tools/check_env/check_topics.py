"""The topics of `freerun check-env`: each looks for one kind of fault and says how to mend it."""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces

from freerun.adapters.action_masks import (
    MASK_KEY,
    MASK_METHOD,
    RandomAllowedActions,
    has_choices,
    usable_mask_source,
)
from freerun.adapters.env_adapter import EnvAdapter
from freerun.adapters.gymnasium_envs import EnvName, make_wrapped
from freerun.adapters.images import IMAGE_ADVICE, has_unknown_images, image_shape, images_go_raw
from freerun.core import EnvFailure, UserError, episode_seed
from freerun.tools.check_env.recorded_episode import (
    REPLAY_SECONDS,
    Env,
    RecordedEpisode,
    difference,
    raising,
    random_actions,
    record,
    replay,
    replay_interleaved,
    same,
    short,
)
from freerun.tools.check_env.remedies import END, FAULTS, REMEDIES, SEED, Level
from freerun.tools.check_env.vector_topic import check_together
from freerun.transport import processes

Verdict = tuple[Level, str, str]
"""The level, what was found, and what to do about it."""

SECONDS_PER_EPISODE = 2.0
MAX_STEPS = 10_000
ENDLESS_STEPS = 1_000
"""An episode that is longer than this when the time is up is taken for one that never ends."""
WORKER_STEPS = 20
WORKER_SECONDS = 60.0
HUGE_ACTION = 100.0
FAST_SECONDS = 100e-6
SLOW_SECONDS = 1e-3
"""Where steps are shorter than this, a few slow ones more likely come from the machine than from the environment."""
NUM_LOCKSTEP_ENVS = 8
UNEVEN_FACTOR = 1.5
"""Step times are uneven where environments in lockstep would wait longer than this many times the mean step."""
FINAL_OBS_KEYS = {"final_obs", "final_observation", "terminal_observation", "final_info"}


class CheckedEnv:
    """An environment and some episodes recorded from it with random actions, for the topics to examine."""

    def __init__(self, name: EnvName, env_args: Mapping[str, Any], num_episodes: int, wrap: str | None = None):
        self.name, self.env_args, self.wrap = name, env_args, wrap
        self.envs: list[Env] = []
        started = time.perf_counter()
        self.env = self.build()
        self.construct_seconds = time.perf_counter() - started
        # In an environment of its own, because a reset may leave something behind.
        self.mask_source = usable_mask_source(self.build())
        masked = None if self.mask_source is None else RandomAllowedActions(self.env, self.mask_source)
        self.player: Env = masked or self.env
        """The environment, for random actions that it allows."""
        self.num_allowed = [] if masked is None else masked.num_allowed
        """How many choices the masks allowed at each step."""
        self.max_seconds = num_episodes * SECONDS_PER_EPISODE
        deadline = time.perf_counter() + self.max_seconds
        self.episodes: list[RecordedEpisode] = []
        for seed in (episode_seed(0, number) for number in range(num_episodes)):
            seconds_left = deadline - time.perf_counter()
            if seconds_left > 0:  # the first episode may have used up the time of all
                self.episodes.append(self._record(seed, seconds_left))
        self.first = next((episode for episode in self.episodes if episode.num_steps), self.episodes[0])
        self.ended = [episode for episode in self.episodes if episode.ended]

    def _record(self, seed: int, seconds: float) -> RecordedEpisode:
        return record(self.player, seed, random_actions(self.player, seed), MAX_STEPS, seconds)

    def build(self) -> Env:
        """Make another environment, which `close` closes."""
        self.envs.append(make_wrapped(self.name, self.env_args, self.wrap))
        return self.envs[-1]

    def close(self) -> tuple[()]:
        """Close all environments. It is the last topic, and its only finding is an exception."""
        for env in self.envs:
            with raising("close()"):
                env.close()
        return ()

    def faults(self, topic: str) -> Iterator[Verdict]:
        """Yield the first fault of each kind that belongs to a topic."""
        # In reverse, so that the earliest episode overwrites what later ones found.
        first = {kind: found for episode in reversed(self.episodes) for kind, found in episode.faults.items()}
        for kind, found in first.items():
            topic_of_kind, level, advice = FAULTS[kind]
            if topic_of_kind == topic:
                yield level, found, advice


# ---------------------------------------------------------------------------------------------- topics
# To add a topic, write a function and name it in TOPICS or STEP_TOPICS. It yields a verdict for each fault, and may
# always end with an "ok" verdict, which is shown only where it stands alone.


def check_spaces(checked: CheckedEnv) -> Iterator[Verdict]:
    """Check that freerun can use the spaces, and that values lie inside them."""
    env = checked.env
    if not (hasattr(env, "observation_space") and hasattr(env, "action_space")):
        return  # `check_errors` reports it
    try:
        # The adapter of training decides what is supported, so that this check cannot disagree with it.
        read = EnvAdapter(env, mask_source=checked.mask_source).observation_space
    except UserError as error:
        found, _, advice = str(error).rpartition(": ")  # messages of freerun end with what to do
        yield "problem", found, advice
        return
    if isinstance(env.action_space, spaces.Box):
        largest = float(np.abs([env.action_space.low, env.action_space.high]).max())
        if largest > HUGE_ACTION:
            size = f"reach {largest:g}" if math.isfinite(largest) else "have no bounds"
            advice = "declare Box(-1, 1) and scale inside the environment: a new policy acts within about ±1"
            yield "warning", f"actions {size}", advice
    if (shape := image_shape(env.observation_space)) and has_unknown_images(env.observation_space):
        yield "warning", images_go_raw(shape), IMAGE_ADVICE
    yield from checked.faults("spaces")
    note = "" if read == env.observation_space else f", converted to {_describe(read)}"
    yield "ok", f"observations {_describe(env.observation_space)}{note}; actions {_describe(env.action_space)}", ""


def check_masks(checked: CheckedEnv) -> Iterator[Verdict]:
    """Report where masks of actions were found. Those that cannot be read end an episode, which `check_errors` says."""
    source, num_allowed = checked.mask_source, checked.num_allowed
    if source is not None:
        share = f": {np.mean(num_allowed):.1f} choices are allowed on average, at least {min(num_allowed)}"
        yield "ok", f"from {source.value}{share if num_allowed else ''}", ""
        return
    if any(MASK_KEY in episode.last_info for episode in checked.episodes):
        where = f'info has an "{MASK_KEY}"'
        if has_choices(checked.env.action_space):
            yield "warning", f"{where} that training does not find", f"give the environment a method {MASK_METHOD}()"
        else:
            yield "warning", f"{where}, but only discrete actions can have masks", "leave it out: it is not used"


def _describe(space: spaces.Space[Any]) -> str:
    return f"Box{space.shape} {space.dtype}" if isinstance(space, spaces.Box) else short(space)


def check_errors(checked: CheckedEnv) -> Iterator[Verdict]:
    """Report the first exception that the environment raised."""
    failed = next((episode for episode in checked.episodes if episode.failure), None)
    if failed is not None and failed.failure:
        seed = failed.seed
        again = f"to see it again: env.reset(seed={seed}) and actions after env.action_space.seed({seed})"
        yield "problem", failed.failure, next((REMEDIES[part] for part in REMEDIES if part in failed.failure), again)
        return
    num_steps = sum(episode.num_steps for episode in checked.episodes)
    yield "ok", f"none in {num_steps:,} steps of {len(checked.episodes)} episodes", ""


def check_interface(checked: CheckedEnv) -> Iterator[Verdict]:
    """Check what `reset` and `step` return."""
    yield from checked.faults("interface")
    buffer = "; the same array each time, changed in place, which freerun copies" if checked.first.reuses_buffer else ""
    yield "ok", f"reset returns two values, step returns five{buffer}", ""


def check_values(checked: CheckedEnv) -> Iterator[Verdict]:
    """Check shapes, types and finiteness of what the environment returned."""
    yield from checked.faults("values")
    yield "ok", "no NaN, no infinity, no wrong shape or type", ""


def check_seeding(checked: CheckedEnv) -> Iterator[Verdict]:
    """Check that the seed alone decides an episode: freerun runs an episode again on any worker after a crash."""
    first, other_seed = checked.first, episode_seed(1, 0)
    second = checked.build()
    if differs := difference(first, replay(second, first, global_seed=1)):
        # With the same global seed as at first, only an environment with its own entropy still differs.
        if difference(first, replay(checked.build(), first)) is None:
            found = "the episode depends on a global generator (`random` or `numpy.random`)"
        else:
            found = "the same seed and actions give another episode"
        yield "problem", f"{found}: {differs}", SEED
    elif differs := difference(first, replay(checked.env, first)):
        yield "problem", f"an episode depends on those before it: {differs}", "set everything anew in reset()"
    elif verdict := _beside_another(checked, other_seed, second):
        yield verdict
    elif difference(first, replay(checked.env, first, other_seed)) is None:
        yield "warning", "another seed gives the same episode", f"unless that is meant, {SEED}"
    else:
        yield "ok", "a seed decides its episode: in a new environment, in a used one, beside another one", ""


def _beside_another(checked: CheckedEnv, other_seed: int, second: Env) -> Verdict | None:
    """Play an episode again while another environment plays in the same process, and say what went wrong."""
    try:
        differs = difference(checked.first, replay_interleaved(checked.player, other_seed, second, checked.first))
    except UserError as refusal:
        return "warning", f"two environments in one process are refused: {refusal}", "give each worker one of them"
    if differs is None:
        return None
    found = f"two environments in one process disturb each other: {differs}"
    return "problem", found, "keep state in self, not in the class or the module"


def check_endings(checked: CheckedEnv) -> Iterator[Verdict]:
    """Check that episodes end, and that a time limit truncates them."""
    lengths = sorted(episode.num_steps for episode in checked.ended)
    longest = max(
        (episode.num_steps for episode in checked.episodes if not episode.ended and not episode.failure), default=0
    )
    limit = checked.env.spec.max_episode_steps if checked.env.spec else None
    num_terminated = sum(episode.results[-1][1] for episode in checked.ended)
    if lengths and longest >= MAX_STEPS:
        yield "warning", f"an episode had not ended after {longest:,} steps", END
    elif len(lengths) > 1 and 1 < lengths[0] == lengths[-1] and num_terminated == len(lengths):
        # Natural endings hardly ever come after the same number of steps.
        found = f"every episode was terminated after exactly {lengths[0]} steps, which looks like a time limit"
        advice = "return truncated=True at a time limit, so that the value of the last state is bootstrapped"
        yield "warning", found, advice
    elif lengths:
        steps = f"{lengths[0]} steps" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]} steps"
        yield "ok", f"episodes of {steps}; {num_terminated} terminated, {len(lengths) - num_terminated} truncated", ""
    elif limit and limit > longest > 0:
        yield "ok", f"none within {longest:,} steps, but a TimeLimit ends episodes after {limit:,}", ""
    elif longest >= ENDLESS_STEPS:
        yield "problem", f"no episode ended within {longest:,} steps", END
    elif longest:
        found = f"no episode ended within {longest:,} steps, which took the {checked.max_seconds:g} s of this check"
        yield "warning", found, f"more --episodes give it more time; if it never ends, {END}"


def check_autoreset(checked: CheckedEnv) -> Iterator[Verdict]:
    """Check that the last observation belongs to the episode, because its value is needed at a truncation."""
    advice = "return the last observation of the episode: its value is needed at a truncation; freerun does the resets"
    keys = {key for episode in checked.ended for key in episode.last_info} & FINAL_OBS_KEYS
    # In an environment whose observation never changes, equal observations prove nothing.
    moving = [episode for episode in checked.ended if not all(same(obs, episode.last_obs) for obs in episode.obs[1:])]
    starts = [episode.obs[0] for episode in checked.episodes if episode.obs]
    if keys:
        yield "problem", f"the environment resets itself: info holds {', '.join(sorted(keys))}", advice
    elif moving and _resets_in_step(checked.env, min(moving, key=lambda episode: episode.num_steps)):
        yield "problem", "step() calls reset() and returns the first observation of the next episode", advice
    elif moving and all(same(episode.last_obs, start) for episode in moving for start in starts):
        yield "warning", "the last observation is always the first one of the next", f"if it resets itself, {advice}"
    elif checked.ended:
        yield "ok", "the last observation of an episode is its own", ""


def _resets_in_step(env: Env, episode: RecordedEpisode) -> bool:
    """Return whether the bare environment calls its own reset in the last step and returns that observation."""
    # A spy takes the place of `reset` on the innermost environment, so that calls from its own `step` are seen.
    bare, reset = env.unwrapped, env.unwrapped.reset
    starts = []

    def spy(*args: Any, **options: Any) -> Any:
        start = reset(*args, **options)
        starts.append(copy.deepcopy(start))
        return start

    bare.reset = spy  # type: ignore[method-assign]
    try:
        again = record(
            env, episode.seed, episode.actions, episode.num_steps, max_seconds=2 * sum(episode.step_seconds) + 1
        )
    finally:
        bare.reset = reset  # type: ignore[method-assign]
    return len(starts) > 1 and same(starts[-1][0], again.last_obs)


def check_workers(checked: CheckedEnv) -> Iterator[Verdict]:
    """Check that a worker process can build the environment, and that it plays the same episode there."""
    first = checked.first
    recipe = (checked.name, dict(checked.env_args), checked.wrap)
    order = (recipe, first.seed, first.actions[: min(first.num_steps, WORKER_STEPS)])
    try:
        # cloudpickle, as in training: it also packs classes that were defined in a notebook.
        with raising("pickling the factory"):
            packed = cloudpickle.dumps(order)
    except EnvFailure as failure:
        advice = "open files, locks and connections inside the environment's __init__, or name it as module:callable"
        yield "problem", str(failure), advice
        return
    problem, obs = _run_in_worker(packed)
    if problem:
        advice = "what it needs must be importable and free to use in a new process (an id: module:Name-v0)"
        yield "problem", problem, advice
    elif same(obs, first.obs[:1]):
        yield "ok", "built and stepped in a worker process, with the same first observation", ""
    elif same(record(checked.env, first.seed, (), 0, REPLAY_SECONDS).last_obs, first.obs[0]):
        advice = (
            "look for what differs between processes: the order of a set of strings, id(), the clock, the process id"
        )
        yield "problem", "in a worker, the same seed gives another first observation", advice
    else:
        # The first observation differs in this process too, which `check_seeding` reports.
        yield "ok", "built and stepped in a worker process", ""


def _run_in_worker(packed: bytes) -> tuple[str | None, Any]:
    """Run the episode in a worker process; return what went wrong there, or None, and the first observation."""
    ours, theirs = processes.context().Pipe()
    process = processes.start(_worker_main, theirs, packed)
    theirs.close()  # with a copy open here, the end of a dead worker would never be seen
    try:
        if ours.poll(WORKER_SECONDS):
            return ours.recv()  # type: ignore[no-any-return]
        return f"a worker did not answer within {WORKER_SECONDS:g} s", None
    except (EOFError, ConnectionResetError):  # it ended without an answer
        process.join()
        return f"a worker died with exit code {process.exitcode}", None
    finally:
        ours.close()
        processes.stop([process], grace_seconds=1.0)


def _worker_main(connection: Connection, packed: bytes) -> None:
    processes.enter_worker()
    try:
        with raising("in a worker, building the environment"):
            recipe, seed, actions = pickle.loads(packed)
            env = make_wrapped(*recipe)
        episode = record(env, seed, actions, WORKER_STEPS, REPLAY_SECONDS)
        connection.send((f"in a worker, {episode.failure}" if episode.failure else None, episode.obs[:1]))
    except (EnvFailure, UserError) as failure:
        connection.send((str(failure), None))


def check_step_times(checked: CheckedEnv) -> Iterator[Verdict]:
    """Report how long steps take, and which flags suit that."""
    seconds = np.sort(np.concatenate([episode.step_seconds for episode in checked.episodes]))
    mean, slowest = float(seconds.mean()), float(seconds[-1])
    p50, p95, p99 = (_duration(value) for value in np.percentile(seconds, (50, 95, 99)).tolist())
    resets = float(np.mean([episode.reset_seconds for episode in checked.episodes]))
    found = (
        f"step {_duration(mean)} on average (p50 {p50}, p95 {p95}, p99 {p99}, max {_duration(slowest)} = "
        f"{slowest / mean:.1f} × mean); reset {_duration(resets)}; construction {_duration(checked.construct_seconds)}"
    )
    # Expected slowest of n steps: the k-th of m sorted times is the slowest with probability (k/m)^n - ((k-1)/m)^n.
    probabilities = np.diff((np.arange(len(seconds) + 1) / len(seconds)) ** NUM_LOCKSTEP_ENVS)
    lockstep = float(probabilities @ seconds) / mean
    if mean < FAST_SECONDS:
        advice = "fast: --envs-per-worker 32 --segment-steps 125 lets one call of the policy serve many environments"
    elif mean < SLOW_SECONDS or lockstep < UNEVEN_FACTOR:
        advice = "slow enough to be worth several workers: --segment-steps 25 hands over parts of episodes"
    else:
        advice = (
            "slow and uneven: --segment-steps 25 hands over parts of episodes, so that nobody waits for the slowest. "
            f"With --mode sync, {NUM_LOCKSTEP_ENVS} environments would wait for it at each step: "
            f"{lockstep:.1f} × the mean"
        )
    yield "ok", found, f"{advice} (--mode freerun, the default; `freerun probe` compares all modes on this machine)"


def _duration(seconds: float) -> str:
    """Write a duration in s, ms or µs."""
    unit, scale = next((row for row in (("s", 1.0), ("ms", 1e-3)) if seconds >= row[1]), ("µs", 1e-6))
    return f"{seconds / scale:.3g} {unit}"


Topic = Callable[[CheckedEnv], Iterable[Verdict]]
TOPICS: dict[str, Topic] = {
    "spaces": check_spaces,
    "masks": check_masks,
    "errors": check_errors,
    "interface": check_interface,
    "values": check_values,
}
STEP_TOPICS: dict[str, Topic] = {
    "seeding": check_seeding,
    "endings": check_endings,
    "autoreset": check_autoreset,
    "workers": check_workers,
    "together": check_together,
    "step times": check_step_times,
}
"""The topics that make sense only where at least one step succeeded."""
