"""Takes the rows out of segments in which an environment was reset instead of stepped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from freerun.core import OPTIONAL_ARRAYS, SEGMENT_ARRAYS, Segment


def without_resting_rows(segments: Sequence[Segment]) -> list[Segment]:
    """The same steps in segments that have no such rows, so that nobody who learns or counts must know of them."""
    return [part for segment in segments for part in _split(segment)]


def _split(segment: Segment) -> Iterator[Segment]:
    if segment.resting is None or not segment.resting.any():
        segment.resting = None
        yield segment
        return
    rests = segment.resting.any(axis=0)
    # Most columns have no such row. They stay together, because every segment costs the learner a little.
    if not rests.all():
        names = [name for name in (*SEGMENT_ARRAYS, *OPTIONAL_ARRAYS) if getattr(segment, name) is not None]
        whole = {name: getattr(segment, name)[:, ~rests] for name in names if name != "resting"}
        memory = None if segment.memory is None else segment.memory[~rests]
        yield Segment(**whole, seconds=segment.seconds, memory=memory)
    num_rows = len(segment.resting)
    for column in np.flatnonzero(rests).tolist():
        stops = [*np.flatnonzero(segment.resting[:, column]).tolist(), num_rows]
        start = 0
        for stop in stops:
            if start < stop:
                part = segment.part(start, stop, column)
                part.resting = None
                if start == 0 and segment.memory is not None:  # later parts begin with an episode, and with no memory
                    part.memory = segment.memory[column : column + 1].copy()
                yield part
            start = stop + 1
