"""`timeline.json`: the timeline in Chrome's trace format, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freerun.telemetry.timeline import STATE_NAMES, Merger, Recording
from freerun.transport.tracks import Block

MOST_SPANS = 500_000
"""Some 50 MB; a longer recording is merged until it fits."""
BYTES_PER_BLOCK = 25
MICROSECONDS = 1e6
PROCESS = 1


def write_trace(recording: Recording, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(_events(recording)):
            file.write((",\n" if number else "") + json.dumps({**event, "pid": PROCESS}, separators=(",", ":")))
        file.write("\n]}\n")


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "args": {"name": "freerun"}}
    for track, name in enumerate(recording.tracks):
        yield {"ph": "M", "name": "thread_name", "tid": track, "args": {"name": name}}
        order = -1 if not name.startswith("worker") else track  # the learner and its stages come first
        yield {"ph": "M", "name": "thread_sort_index", "tid": track, "args": {"sort_index": order}}
    for moment in recording.moments():
        for name, value in moment.figures.items():
            yield {"ph": "C", "name": name, "ts": _microseconds(moment.at), "args": {name: value}}
    yield from _spans(recording)


def _spans(recording: Recording) -> Iterator[dict[str, Any]]:
    """A block of several states becomes a span for each, one after another: their true order was not kept."""
    num_blocks = recording.path.stat().st_size / BYTES_PER_BLOCK
    resolution = recording.grid().seconds * len(recording.tracks) / MOST_SPANS if num_blocks > MOST_SPANS else 0.0
    mergers = [Merger() for _ in recording.tracks]
    merged = (block for each in _blocks(recording) for block in mergers[each.track].add(each, resolution))
    rest = (block for merger in mergers for block in merger.rest())
    for block in itertools.chain(merged, rest):
        start = block.start
        parts = [(state, seconds) for state, seconds in enumerate(block.seconds) if seconds > 0]
        for state, seconds in parts:
            event = {"ph": "X", "name": STATE_NAMES[state], "cat": "state", "tid": block.track}
            event |= {"ts": _microseconds(start), "dur": _microseconds(seconds)}
            if len(parts) > 1:
                event["args"] = {"merged": len(parts)}
            yield event
            start += seconds


def _blocks(recording: Recording) -> Iterator[Block]:
    for moment in recording.moments():
        for track, start, *seconds in moment.blocks.tolist():
            yield Block(int(track), start, tuple(seconds))


def _microseconds(seconds: float) -> float:
    return round(seconds * MICROSECONDS, 1)
