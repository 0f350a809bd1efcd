"""Checkpoints are whole or refused, whatever happens to their bytes."""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from freerun.core import RingBuffer, UserError
from freerun.persistence import checkpoint, files, ring_files
from freerun.persistence.checkpoint import Checkpoints, Damaged
from freerun.persistence.checkpoint_sink import Interval
from freerun.persistence.state_codec import Packer, check_fit, unpack

STATE: dict[str, Any] = {
    "weights": torch.arange(600, dtype=torch.float32),
    "optimizer": {0: {"step": torch.tensor(3.0)}, 1: {"lr": 1e-3}},
    "moments": np.array([[0.1, 0.2]]),
    "nothing": None,
    "score": 1.0,
}


def written(folder: Path, num: int = 2, **more: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder, 5)
    for update in range(1, num + 1):
        checkpoints.write(update, {**STATE, "update": update, **more}, b"policy" * 50)
    return checkpoints


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor | np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))
        assert type(a) is type(b)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    written(tmp_path)
    found = checkpoint.newest(tmp_path)
    assert found.path.name == "update-000000002"
    assert_equal({name: found.state[name] for name in STATE}, STATE)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
)


@given(states)
@settings(max_examples=200)
def test_any_nested_state_comes_back_through_json(state: Any) -> None:
    packer = Packer(lambda path, ring: None)
    text = json.dumps(packer.pack(state, "state"), allow_nan=False)
    assert_equal(unpack(json.loads(text), packer.arrays, lambda content: None), state)


def test_counters_sets_and_what_no_checkpoint_can_hold() -> None:
    packer = Packer(lambda path, ring: None)
    packed = json.loads(json.dumps(packer.pack({"a": Counter({3: 4}), "b": {2, 1}}, "state")))
    assert unpack(packed, {}, lambda content: None) == {"a": {3: 4}, "b": {1, 2}}
    with pytest.raises(TypeError, match="state/x is a function"):
        packer.pack({"x": lambda: 0}, "state")


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def assert_refused(folder: Path) -> None:
    """The newest checkpoint is not used, and the one before it is."""
    with pytest.raises(Damaged):
        checkpoint.load(folder / "checkpoints" / "update-000000002")
    assert checkpoint.newest(folder).path.name == "update-000000001"


def test_truncated_and_missing_files_are_refused_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path)
    newest = tmp_path / "checkpoints" / "update-000000002"
    for path in files_of(newest):
        content = path.read_bytes()
        for length in {0, len(content) - 1, *range(0, len(content), 1000)}:
            path.write_bytes(content[:length])
            assert_refused(tmp_path)
        path.unlink()
        assert_refused(tmp_path)
        path.write_bytes(content)
    assert "is damaged and not used" in caplog.text
    assert "update-000000001 is used, the newest checkpoint that is whole" in caplog.text
    assert checkpoint.newest(tmp_path).path == newest


def test_single_flipped_bits_are_always_detected(tmp_path: Path) -> None:
    written(tmp_path)
    draw = random.Random(0)
    for path in files_of(tmp_path / "checkpoints" / "update-000000002"):
        content = bytearray(path.read_bytes())
        for _ in range(100):
            place, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
            content[place] ^= bit
            path.write_bytes(content)
            with pytest.raises(Damaged):
                checkpoint.load(path.parent)
            content[place] ^= bit
        path.write_bytes(content)
    checkpoint.load(tmp_path / "checkpoints" / "update-000000002")


def test_swapped_files_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    first, second = (tmp_path / "checkpoints" / f"update-00000000{number}" for number in (1, 2))
    shutil.copy(first / "state.json", second / "state.json")
    assert_refused(tmp_path)


def test_none_that_can_be_used_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it has no checkpoint"):
        checkpoint.newest(tmp_path)
    written(tmp_path)
    for name in checkpoint.names(tmp_path):
        (tmp_path / "checkpoints" / name / "state.json").unlink()
    with pytest.raises(UserError, match=r"none of its checkpoints can be used \(update-000000002: state.json is miss"):
        checkpoint.newest(tmp_path)


HUGE = b'{"a":{"dtype":"F32","shape":[999999999999],"data_offsets":[0,8]}}'


def rewrite(path: Path, content: bytes) -> None:
    """Replace a file and its hash, as an attacker would who knows how manifests are made."""
    path.write_bytes(content)
    manifest = path.parent / "MANIFEST"
    lines = [line for line in manifest.read_text().splitlines() if not line.endswith(path.name)]
    manifest.write_text("\n".join([*lines, f"{files.sha256_of(path)}  {path.name}"]) + "\n")


def test_a_newer_format_is_refused_and_not_mistaken_for_damage(tmp_path: Path) -> None:
    written(tmp_path)
    state = tmp_path / "checkpoints" / "update-000000002" / "state.json"
    rewrite(state, json.dumps({**json.loads(state.read_text()), "format": 99}).encode())
    with pytest.raises(UserError, match=r"written by a newer freerun \(format 99, this one reads 1\): update"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b'{"format": 1, "score": NaN}'),
        ("state.json", b"[" * 100_000 + b"]" * 100_000),
        ("state.json", b'{"format": ' + b"9" * 10_000 + b"}"),
        ("state.json", b'{"format": 1, "algorithm": {"$array": "state/none"}}'),
        ("state.json", b'{"format": 1, "algorithm": {"$import": "os:system"}}'),
        ("state.json", b'{"format": 1, "ring": {"$ring": {"path": "a", "total": 5, "capacity": 9, "chunks": []}}}'),
        ("state.json", b'{"format": 1, "r": {"$ring": {"chunks": [["../../../etc/passwd", 0, 1]]}}}'),
        ("tensors.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        ("tensors.safetensors", b"\x50" + b"\0" * 7 + HUGE.ljust(80)),
        ("tensors.safetensors", b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    ],
)  # fmt: skip
def test_crafted_content_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    written(tmp_path)
    rewrite(tmp_path / "checkpoints" / "update-000000002" / name, content)
    with pytest.raises((Damaged, UserError)):
        checkpoint.load(tmp_path / "checkpoints" / "update-000000002")


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "../rows/../../x-0-1-0123456789abcdef.safetensors"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    written(tmp_path)
    manifest = tmp_path / "checkpoints" / "update-000000002" / "MANIFEST"
    manifest.write_text(manifest.read_text() + f"{'0' * 64}  {name}\n")
    with pytest.raises(Damaged, match="not one that freerun wrote"):
        checkpoint.load(manifest.parent)


def test_files_that_never_end_are_not_read(tmp_path: Path) -> None:
    written(tmp_path)
    state = tmp_path / "checkpoints" / "update-000000002" / "state.json"
    state.unlink()
    state.symlink_to("/dev/zero")
    with pytest.raises(Damaged, match=r"state\.json is missing"):
        checkpoint.load(state.parent)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(files.MOST_JSON_BYTES + 1)
    with pytest.raises(UserError, match="is larger than 64 MiB"):
        files.read_json(huge)


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"state/a is \(1,\) of torch.float32, not \(5,\)"):
        check_fit({"a": torch.zeros(1)}, {"a": torch.zeros(5)})
    with pytest.raises(UserError, match="state lacks a"):
        check_fit({}, {"a": 1})
    with pytest.raises(UserError, match="state/a is 5, not a mapping"):
        check_fit({"a": 5}, {"a": {}})


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for update, score in enumerate([1.0, 9.0, 2.0, 3.0, 4.0], start=1):
        checkpoints.write(update, {"score": score}, b"")
    assert checkpoint.names(tmp_path) == ["update-000000002", "update-000000004", "update-000000005"]
    best = checkpoint.best(tmp_path)
    assert best is not None
    assert best.name == "update-000000002"
    again = Checkpoints(tmp_path, 1, checkpoint.newest(tmp_path))
    again.write(6, {"score": None}, b"")
    assert checkpoint.names(tmp_path) == ["update-000000002", "update-000000006"]


def test_going_on_from_an_older_one_removes_what_could_not_be_used_once_there_is_a_newer(tmp_path: Path) -> None:
    written(tmp_path, num=3)
    (tmp_path / "checkpoints" / "update-000000003" / "state.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path, 5, checkpoint.newest(tmp_path))
    assert "update-000000003" in checkpoint.names(tmp_path)
    checkpoints.write(3, STATE, b"again")
    assert checkpoint.newest(tmp_path).path.name == "update-000000003"


def test_what_a_killed_run_was_writing_is_removed(tmp_path: Path) -> None:
    written(tmp_path)
    half = tmp_path / "checkpoints" / ".writing-update-000000003"
    half.mkdir()
    (half / "state.json").write_text("{")
    Checkpoints(tmp_path, 2, checkpoint.newest(tmp_path))
    assert not half.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("60s", (60, math.inf)), ("1.5m", (90, math.inf)), ("50k", (math.inf, 50_000)), ("7", (math.inf, 7)),
     ("2h", (7200, math.inf)), ("never", (math.inf, math.inf))],
)  # fmt: skip
def test_intervals(text: str, expected: tuple[float, float]) -> None:
    interval = Interval.read(text)
    assert (interval.seconds, interval.steps) == expected


@pytest.mark.parametrize("text", ["", "0", "soon", "-5s", "5d", "1e3"])
def test_intervals_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--checkpoint-every is a time"):
        Interval.read(text)


class RingMachine(RuleBasedStateMachine):
    """A replay buffer, its checkpoints and crashes in any order: what is loaded is what was saved."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = Path(tempfile.mkdtemp())
        self.saved: dict[int, np.ndarray[Any, Any]] = {}
        self.update = 0

    @initialize(capacity=st.integers(1, 40))
    def start(self, capacity: int) -> None:
        self.rows, self.total = np.zeros((capacity, 3)), 0
        self.checkpoints = Checkpoints(self.folder, 2)

    @rule(num=st.integers(0, 60))
    def add(self, num: int) -> None:
        for _ in range(num):
            self.rows[self.total % len(self.rows)] = (self.total, self.update, self.total % 7)
            self.total += 1

    @rule()
    def save(self) -> None:
        self.update += 1
        self.checkpoints.write(self.update, {"ring": RingBuffer({"rows": self.rows}, self.total), "score": None}, b"")
        self.saved[self.update] = self.rows.copy()
        self.saved = {update: self.saved[update] for update in sorted(self.saved)[-2:]}

    @precondition(lambda self: self.saved)
    @rule(damage=st.booleans())
    def crash_and_go_on(self, damage: bool) -> None:
        if damage and len(self.saved) > 1:
            newest = max(self.saved)
            (self.folder / "checkpoints" / f"update-{newest:09}" / "state.json").write_text("")
            del self.saved[newest]
        found = checkpoint.newest(self.folder)
        self.update = int(found.path.name.partition("-")[2])
        assert self.update == max(self.saved)
        ring = found.state["ring"]
        rows = np.zeros_like(self.rows)
        for first, columns in ring.pieces():
            for place, row in enumerate(columns["rows"]):
                rows[(first + place) % len(rows)] = row
        self.rows, self.total = rows, ring.total
        np.testing.assert_array_equal(rows, self.saved[self.update])
        self.checkpoints = Checkpoints(self.folder, 2, found)

    def teardown(self) -> None:
        for name in checkpoint.names(self.folder):
            path = self.folder / "checkpoints" / name
            if (path / "state.json").stat().st_size:
                checkpoint.load(path)
        shutil.rmtree(self.folder)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("freerun").setLevel(logging.WARNING)


TestRings = RingMachine.TestCase
TestRings.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


def test_rows_that_were_stored_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_files, "CHUNK_BYTES", 100 * 8)
    rows = np.arange(1000.0)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.write(1, {"ring": RingBuffer({"rows": rows}, 500), "score": None}, b"")
    folder = tmp_path / "checkpoints" / "rows"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    checkpoints.write(2, {"ring": RingBuffer({"rows": rows}, 640), "score": None}, b"")
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(before) == 5
    assert before.items() <= after.items()
    assert len(after) == 7
    for update in (3, 4):  # the ring has wrapped: the oldest chunks go when nobody needs them any more
        checkpoints.write(update, {"ring": RingBuffer({"rows": rows}, 1000 + 300 * (update - 2)), "score": None}, b"")
    firsts = {int(path.name.split("-")[-3]) for path in folder.iterdir()}
    assert min(firsts) == 300
