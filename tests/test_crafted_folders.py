"""Run folders that were crafted to do harm run nothing, overwrite nothing and do not take all memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import freerun
from freerun.persistence.checkpoint import MANIFEST, STATE, Damaged, names, verify
from freerun.tools.cli.main import main
from freerun.tools.watch.run_list import RunList

QUICK: dict[str, Any] = {"total_episodes": 4, "episodes_per_update": 2, "quiet": True, "mode": "sequential"}
DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that names no code of the user's. The tests replace its other files."""
    run_dir = tmp_path_factory.mktemp("original") / "run"
    freerun.train("CartPole-v1", run_dir=run_dir, hidden_sizes=(4,), **QUICK)
    return run_dir


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def resume(folder: Path) -> list[str]:
    return ["train", "--resume", str(folder), "--total-episodes", "6", "-q"]


def commands(folder: Path) -> Iterator[list[str]]:
    """Every command that opens a run folder, except the web page."""
    yield ["eval", str(folder), "--episodes", "1"]
    yield ["replay", str(folder)]
    for what in ("curves", "timeline", "scaling"):
        yield ["plot", str(folder), "--what", what, "-o", str(folder.parent / "out.svg")]
    yield resume(folder)


def page(folder: Path) -> dict[str, Any]:
    """Ask the server everything that the page asks about the only run. Each request must be answered."""
    runs = RunList([folder.parent])
    listed = runs.list()
    answers: dict[str, Any] = {"runs": listed}
    for name in (each["id"] for each in listed):
        run = runs.find(name)
        run.read_new()
        answers |= {"run": run.overview(), "curves": run.curves.columns(), "timeline": run.cells(0.0, None, 20)}
    json.dumps(answers, allow_nan=False)
    return answers


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / names(folder)[-1]


def sign_again(checkpoint: Path) -> None:
    """Write hashes that fit, as an attacker can: they are no secret."""
    lines = []
    for line in (checkpoint / MANIFEST).read_text().splitlines():
        name = line.split("  ")[1]
        lines.append(f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n")
    (checkpoint / MANIFEST).write_text("".join(lines))


def test_a_whole_folder_can_be_opened_by_all(folder: Path) -> None:
    for words in commands(folder):
        assert main(words) == 0, words
    assert page(folder)["run"]["env"] == "CartPole-v1"


# ---------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "ledger.jsonl", "timeline.jsonl", "log.txt", "incidents.jsonl", "bad/episode-1.npz"]
)
def test_nothing_is_written_through_a_link_that_leads_out(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("dear\n")
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to("../victim" if link.parent == folder else victim)
    assert main(resume(folder)) == 2
    assert "is a link to" in capsys.readouterr().err
    assert victim.read_text() == "dear\n"


def test_nothing_is_removed_in_a_folder_elsewhere(folder: Path, original: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").symlink_to(original / "checkpoints")
    before = sorted(path.name for path in (original / "checkpoints").iterdir())
    assert main(resume(folder)) == 2
    assert sorted(path.name for path in (original / "checkpoints").iterdir()) == before


def test_links_within_the_folder_are_nobodys_business(folder: Path) -> None:
    (folder / "last").symlink_to(newest(folder).relative_to(folder))
    assert main(resume(folder)) == 0


@pytest.mark.parametrize(
    "name", ["../../../../etc/passwd", "/etc/passwd", "../rows/../../../x", "..", "state.json/../x"]
)
def test_a_manifest_names_only_files_of_its_own(name: str, folder: Path) -> None:
    manifest = newest(folder) / MANIFEST
    manifest.write_text(manifest.read_text() + f"{'0' * 64}  {name}\n")
    with pytest.raises(Damaged, match="not one that freerun wrote"):
        verify(manifest.parent)


# ---------------------------------------------------------------------------------------------- sizes


def test_a_file_with_holes_is_not_read_into_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = psutil.virtual_memory().total // 4 * 4
    header = json.dumps({"weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path = folder / "policy.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert main(["eval", str(folder), "--episodes", "1"]) == 2
    assert "more than half of this machine's memory" in capsys.readouterr().err
    for checkpoint in (folder / "checkpoints").glob("update-*"):
        path.rename(checkpoint / path.name)
        path = checkpoint / path.name
    assert main(resume(folder)) in (0, 2), "an older one may be whole"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        b'\x50\0\0\0\0\0\0\0{"w":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'.ljust(88),
        len(DEEP).to_bytes(8, "little") + DEEP.encode(),
    ],
)
def test_a_policy_that_is_none_is_refused(content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "policy.safetensors").write_bytes(content)
    assert main(["eval", str(folder), "--episodes", "1"]) == 2
    assert "is not a policy that freerun wrote" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- JSON

TEXTS = {
    "nested": DEEP,
    "in an object": f'{{"env": {DEEP}}}',
    "a long number": f'{{"env": "CartPole-v1", "seed": {"9" * 10_000}}}',
    "no JSON": "\x00{",
    "a list": "[1, 2]",
    "other kinds": '{"env": ["os:system"], "mode": {}, "algo": 3, "seed": "x", "num_workers": 1e999}',
    "nothing": "{}",
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["config.json", "summary.json"])
def test_json_that_makes_no_sense(name: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).write_text(TEXTS[text])
    page(folder)
    for words in commands(folder):
        assert main(words) in (0, 2), words
        assert "Traceback" not in capsys.readouterr().err
    page(folder)


LINES = {
    "nested": DEEP,
    "no JSON": "{",
    "a list": "[1, 2]",
    "texts": '{"step": "many", "return_mean": {"a": 1}, "lag_share/x": 1, "update": 1, "segments": [[["a"]]]}',
    "beyond": '{"step": 1e999, "return_mean": 1e999, "at": 1e999, "blocks": [[0, 1e999, 0, 1e999]]}',
    "huge": f'{{"step": {"9" * 4000}, "return_mean": 1}}',
    "of others": '{"at": 1.0, "blocks": [[999999, 0.0, 0, 1.0], [0, 0.0, 99, 1.0], [-3, -1e300, 0, -1e300]]}',
    "no head": '{"tracks": 3, "began": "then"}',
}


@pytest.mark.parametrize("text", LINES)
@pytest.mark.parametrize("first", [True, False])
def test_lines_that_make_no_sense(text: str, first: bool, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.jsonl", "timeline.jsonl", "ledger.jsonl", "incidents.jsonl"):
        path = folder / name
        old = path.read_text() if path.exists() else ""
        path.write_text(f"{LINES[text]}\n{old}" if first else f"{old}{LINES[text]}\n")
    page(folder)
    for words in commands(folder):
        assert main(words) in (0, 2), words
        assert "Traceback" not in capsys.readouterr().err


STATES: dict[str, Any] = {
    "config": [None, [], {"env": "os:system"}, {"env": ["os:system"]}, {"env": "CartPole-v1", "mode": 7}],
    "lines": [
        None,
        {"metrics": {"bytes": 1 << 62, "sha256": ""}, "ledger": {"bytes": -1, "sha256": ""}},
        {"metrics": 3},
    ],
    "algorithm": [None, {}, {"$items": [[[], 1]]}],
    "ledger": [None, {}, "x"],
    "counts": [None, {"episodes_started": 1, "nobody": 2}],
    "torch_rng": [None, "x", {"$array": "nowhere"}],
    "wall_seconds": ["x", None, {"$float": "many"}],
    "update": ["x", -1],
    "format": [None, "1", 10**30],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in STATES.items() for value in values])
def test_states_with_hashes_that_fit(name: str, value: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for checkpoint in names(folder):
        path = folder / "checkpoints" / checkpoint
        state = json.loads((path / STATE).read_text())
        state[name] = value
        (path / STATE).write_text(json.dumps(state))
        sign_again(path)
    code = main(resume(folder))
    assert code == 2 or (code == 0 and name == "update")
    assert "Traceback" not in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- where figures go


@pytest.mark.parametrize(
    "more",
    [
        {"track": ["prometheus"], "prometheus_host": "0.0.0.0"},
        {"track": ["wandb"], "wandb_entity": "somebody"},
        {"run_dir": "elsewhere"},
    ],
)
def test_a_folder_does_not_say_where_to_write_or_whom_to_tell(
    more: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    assert main(["train", "--config", str(folder / "config.json"), "-q"]) == 2
    words = capsys.readouterr().err
    assert "--trust" in words or "--run-dir" in words
    assert not Path("elsewhere").exists()
