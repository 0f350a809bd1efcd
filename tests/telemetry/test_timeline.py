"""The timeline is recorded beside a run, read back, drawn in a terminal, and written as a trace for Perfetto."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import freerun
from freerun.core import Array, Counts, State
from freerun.telemetry.machine_load import MachineLoad
from freerun.telemetry.perfetto_trace import write_trace
from freerun.telemetry.timeline import FILE_NAME, RecordedTimeline, TimelineGrid, TimelineRecord, spread_blocks
from freerun.telemetry.timeline_chart import SHADES, chart
from freerun.telemetry.timeline_recorder import BlockMerger, TimelineRecorder
from freerun.transport import processes
from freerun.transport.state_tracks import NUM_STATES, SharedTracks, TrackBlock


def block(start: float, busy: float, slot: float = 0.0, track: int = 0) -> TrackBlock:
    return TrackBlock(track, start, (busy, slot, *[0.0] * (NUM_STATES - 2)))


def recorded(tmp_path: Path, num_workers: int = 2) -> RecordedTimeline:
    """Written by hand: each worker is busy for 3 s and waits for 1; the learner does the opposite."""
    names = [*(f"worker {worker}" for worker in range(num_workers)), "learner"]
    lines: list[object] = [{"tracks": names, "states": [], "began": 1000.0}]
    lines += [
        {"at": 3.0, "cpu_percent": 50.0, "blocks": [[worker, 0.0, 0, 3.0] for worker in range(num_workers)]},
        {"at": 4.0, "queue_percent": 10.0, "blocks": [[worker, 3.0, 2, 1.0] for worker in range(num_workers)]},
        {"at": 4.0, "blocks": [[num_workers, 0.0, 0, 1.0, 3, 3.0]]},
    ]
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"at": 5, "blo')
    found = RecordedTimeline.of(tmp_path)
    assert found is not None
    return found


def test_a_recording_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    recording = recorded(tmp_path)
    assert recording.tracks == ["worker 0", "worker 1", "learner"]
    assert recording.began == 1000.0
    assert recording.grid().seconds == 4.0
    assert [record.figures for record in recording.records()] == [{"cpu_percent": 50.0}, {"queue_percent": 10.0}, {}]
    assert recording.grid().cells(0.0, 4.0, 1)[0].tolist() == [[3.0, 0, 1.0, 0, 0, 0, 0]]


def test_no_recording_is_none(tmp_path: Path) -> None:
    assert RecordedTimeline.of(tmp_path) is None


def test_what_is_noted_is_recorded(tmp_path: Path) -> None:
    tracks = SharedTracks(processes.context(), ["worker 0", "learner"])
    timeline = TimelineRecorder(tmp_path / FILE_NAME, tracks, lambda: Counts(queue_fill=0.5), MachineLoad(None))
    tracks.set_state(0, State.BUSY)
    tracks.set_state(1, State.WAITING_FOR_DATA)
    timeline.close()
    recording = RecordedTimeline.of(tmp_path)
    assert recording is not None
    (record,) = recording.records()
    assert record.blocks[:, 0].tolist() == [0, 1]
    assert (record.blocks[:, 2:] > 0).nonzero()[1].tolist() == [State.BUSY, State.WAITING_FOR_DATA]
    assert record.figures == {"queue_percent": 50.0, "worker_restarts": 0}


def test_a_run_that_goes_on_is_recorded_in_the_same_file(tmp_path: Path) -> None:
    tracks = SharedTracks(processes.context(), ["worker 0", "worker 1", "learner"])
    recorded(tmp_path)  # for 4 s, its last line torn
    timeline = TimelineRecorder(tmp_path / FILE_NAME, tracks, Counts, MachineLoad(None))
    tracks.set_state(1, State.BUSY)
    timeline.close()
    recording = RecordedTimeline.of(tmp_path)
    assert recording is not None
    *_, last = recording.records()
    assert len(list(recording.records())) == 4
    assert last.at >= 4.0
    assert last.blocks[0, 1] >= 4.0
    others = SharedTracks(processes.context(), ["worker 0", "learner"])
    TimelineRecorder(tmp_path / FILE_NAME, others, Counts, MachineLoad(None)).close()
    anew = RecordedTimeline.of(tmp_path)
    assert anew is not None
    assert anew.tracks == ["worker 0", "learner"]
    assert len(list(anew.records())) == 1


def test_a_failure_of_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freerun.telemetry.timeline_recorder.EVERY_SECONDS", 0.001)

    has_failed = threading.Event()

    def failing() -> Counts:
        has_failed.set()
        raise RuntimeError("no counts")

    timeline = TimelineRecorder(
        tmp_path / FILE_NAME, SharedTracks(processes.context(), ["learner"]), failing, MachineLoad(None)
    )
    assert has_failed.wait(30)
    with pytest.raises(RuntimeError, match="no counts"):
        timeline.close()


def test_short_blocks_are_merged_and_long_ones_stay() -> None:
    merger = BlockMerger()
    blocks = [block(0.0, 0.5), block(0.5, 0.25, 0.5), block(1.25, 2.0), block(3.25, 0.5)]
    merged = [each for added in blocks for each in merger.add(added, resolution_seconds=1.0)] + merger.rest()
    assert merged == [block(0.0, 0.75, 0.5), block(1.25, 2.0), block(3.25, 0.5)]


def test_blocks_with_a_gap_between_them_are_not_merged() -> None:
    merger = BlockMerger()
    merged = [each for added in (block(0, 0.5), block(9, 0.5)) for each in merger.add(added, 1.0)] + merger.rest()
    assert merged == [block(0, 0.5), block(9, 0.5)]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=50), st.floats(0, 3))
def test_merging_loses_nothing(parts: list[tuple[float, float]], resolution: float) -> None:
    merger, start, blocks = BlockMerger(), 0.0, []
    for busy, slot in parts:
        blocks.append(block(start, busy, slot))
        start = blocks[-1].stop
    merged = [each for added in blocks for each in merger.add(added, resolution)] + merger.rest()
    assert sum(each.seconds[0] for each in merged) == pytest.approx(sum(busy for busy, _ in parts))
    assert sum(each.seconds[1] for each in merged) == pytest.approx(sum(slot for _, slot in parts))
    assert all(sum(each.seconds) >= resolution for each in merged[:-1])


def rows(*blocks: TrackBlock) -> Array:
    return np.array([(each.track, each.start, *each.seconds) for each in blocks]).reshape(-1, 2 + NUM_STATES)


def test_cells_share_out_blocks_by_time() -> None:
    found = spread_blocks(rows(block(0.5, 1.0), block(1.5, 0.0, 2.5)), 1, 0.0, 1.0, 3)
    assert found[0, :, :2].tolist() == [[0.5, 0], [0.5, 0.5], [0, 1.0]]
    later = spread_blocks(rows(block(0.5, 1.0), block(1.5, 0.0, 2.5)), 1, 1.0, 1.0, 4)
    assert later[0, :, :2].tolist() == [[0.5, 0.5], [0, 1.0], [0, 1.0], [0, 0]]


@given(st.lists(st.floats(0, 2), min_size=1, max_size=30), st.integers(1, 7))
def test_a_grid_holds_every_second_however_long_it_gets(lengths: list[float], num_cells: int) -> None:
    grid, start = TimelineGrid(2, num_cells=4, cell_seconds=0.25), 0.0
    for seconds in lengths:
        added = block(start, seconds, seconds / 2, track=1)
        start = added.stop
        grid.add(TimelineRecord(start, {}, rows(added)))
    found = grid.cells(0.0, max(start, 1e-3), num_cells)
    assert found.shape == (2, num_cells, NUM_STATES)
    assert found[1].sum(axis=0)[:2] == pytest.approx([sum(lengths), sum(lengths) / 2], rel=1e-4, abs=1e-5)
    assert not found[0].any()


def test_the_chart_shows_who_was_busy_when(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(chart(recorded(tmp_path), 120))
    legend, learner, first, _, axis = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(symbol in legend for symbol in (*SHADES, "x")), "every symbol is explained"
    assert learner.split()[0] == "learner"
    assert "▒" * 60 in learner  # a block of two states: a quarter of it busy
    assert "█" * 45 + "░" * 15 in first
    assert first.split("░")[-1].strip() == "75% busy, waits 25% weights"
    assert axis.split() == ["0", "s", "4.0", "s"]


def test_the_chart_fits_a_narrow_terminal(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(chart(recorded(tmp_path), 80))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 5
    assert max(map(len, lines)) <= 80
    assert lines[2].rstrip().endswith("75% busy, waits 25% weights")
    assert "█" * 31 + "▓" + "░" * 10 in lines[2]  # 42 cells are left beside 8 + 28 letters and 2 gaps


def test_many_workers_share_rows(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(chart(recorded(tmp_path, num_workers=100), 120))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[2].startswith("workers 0–6 ")
    assert lines[16].startswith("workers 98–99 ")


def test_the_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    write_trace(recorded(tmp_path), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "worker 0", 1: "worker 1", 2: "learner"}
    spans = [(event["tid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert (0, "busy", 0.0, 3e6) in spans
    assert (0, "waiting-for-weights", 3e6, 1e6) in spans
    assert [span for span in spans if span[0] == 2] == [(2, "busy", 0.0, 1e6), (2, "waiting-for-data", 1e6, 3e6)]
    assert {"ph": "C", "name": "cpu_percent", "ts": 3e6, "args": {"cpu_percent": 50.0}, "pid": 1} in events
    assert all(event["pid"] == 1 for event in events)


def test_a_long_recording_is_merged_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freerun.telemetry.perfetto_trace.MOST_SPANS", 2)
    write_trace(recorded(tmp_path), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(event["name"], event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert spans == [("busy", 3e6), ("waiting-for-weights", 1e6)]  # one block, written as two spans
    assert all(event["args"]["merged"] == 2 for event in events if event["ph"] == "X")


def test_a_stage_of_mbpo_has_a_track(run_dir: Path) -> None:
    small = {"hidden_sizes": (8,), "batch_size": 8, "updates_per_step": 0.1, "rollouts_per_step": 1.0}
    model = {
        "num_models": 2,
        "steps_per_model_training": 100,
        "num_elites": 1,
        "model_hidden_sizes": (8,),
        "learning_starts": 100,
    }
    settings = {"mode": "batch", "num_envs": 1, "num_steps_per_env": 50, "total_steps": 600, "stages": "concurrent"}
    freerun.train("Pendulum-v1", algo="mbpo", quiet=True, run_dir=run_dir, **settings, **small, **model)
    recording = RecordedTimeline.of(run_dir)
    assert recording is not None
    assert recording.tracks == ["worker 0", "learner", "model trainer", "model rollouts"]
    assert (recording.grid().cells(0.0, 1000.0, 1)[:, 0, State.BUSY] > 0).all()
