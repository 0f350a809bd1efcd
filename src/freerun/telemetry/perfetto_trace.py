"""Writes `timeline.json`: the timeline in Chrome's trace format, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freerun.telemetry.timeline import STATE_NAMES, RecordedTimeline
from freerun.telemetry.timeline_recorder import BlockMerger
from freerun.transport.state_tracks import TrackBlock

MOST_SPANS = 500_000
"""About 50 MB. The blocks of a longer recording are merged until they fit."""
BYTES_PER_BLOCK = 25
"""About what a block takes in timeline.jsonl: enough to estimate the number of blocks from the size of the file."""
MICROSECONDS = 1e6
PROCESS = 1


def write_trace(recording: RecordedTimeline, path: Path) -> None:
    """Write the trace event by event, because a long one does not fit into memory."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(_events(recording)):
            file.write((",\n" if number else "") + json.dumps({**event, "pid": PROCESS}, separators=(",", ":")))
        file.write("\n]}\n")


def _events(recording: RecordedTimeline) -> Iterator[dict[str, Any]]:
    # Event types of the format: M is metadata, C a counter, X a span with a duration.
    yield {"ph": "M", "name": "process_name", "args": {"name": "freerun"}}
    for track, name in enumerate(recording.tracks):
        yield {"ph": "M", "name": "thread_name", "tid": track, "args": {"name": name}}
        order = -1 if not name.startswith("worker") else track  # the learner and its stages come first
        yield {"ph": "M", "name": "thread_sort_index", "tid": track, "args": {"sort_index": order}}
    for record in recording.records():
        for name, value in record.figures.items():
            yield {"ph": "C", "name": name, "ts": _microseconds(record.at), "args": {name: value}}
    yield from _spans(recording)


def _spans(recording: RecordedTimeline) -> Iterator[dict[str, Any]]:
    """Yield a span for each state of a block, one after another. Their true order within the block is unknown."""
    num_blocks = recording.path.stat().st_size / BYTES_PER_BLOCK
    # Blocks at least this long, on all tracks, come to no more than MOST_SPANS.
    resolution = recording.grid().seconds * len(recording.tracks) / MOST_SPANS if num_blocks > MOST_SPANS else 0.0
    mergers = [BlockMerger() for _ in recording.tracks]
    merged = (block for each in _blocks(recording) for block in mergers[each.track].add(each, resolution))
    rest = (block for merger in mergers for block in merger.rest())
    for block in itertools.chain(merged, rest):
        start = block.start
        parts = [(state, seconds) for state, seconds in enumerate(block.seconds) if seconds > 0]
        for state, seconds in parts:
            event = {"ph": "X", "name": STATE_NAMES[state], "cat": "state", "tid": block.track}
            event |= {"ts": _microseconds(start), "dur": _microseconds(seconds)}
            if len(parts) > 1:  # tells a reader of the trace that start and end of this span are not exact
                event["args"] = {"merged": len(parts)}
            yield event
            start += seconds


def _blocks(recording: RecordedTimeline) -> Iterator[TrackBlock]:
    for record in recording.records():
        for track, start, *seconds in record.blocks.tolist():
            yield TrackBlock(int(track), start, tuple(seconds))


def _microseconds(seconds: float) -> float:
    return round(seconds * MICROSECONDS, 1)
