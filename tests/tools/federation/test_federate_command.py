"""The words of `freerun federate`, and what it says where it cannot go on."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest

import freerun
from freerun.core import UserError
from freerun.tools.cli.federate_command import split_sites
from freerun.tools.cli.main import main
from freerun.tools.federation.federation_options import FederationOptions
from freerun.tools.federation.site_link import SiteLink

SMALL = ["CartPole-v1", "--mode", "sequential", "--steps-per-update", "100", "--hidden-sizes", "8", "--quiet"]


def test_words_before_the_first_site_are_for_all() -> None:
    words = ["CartPole-v1", "--seed", "3", "--site", "a", "--gamma", "0.9", "--site", "b"]
    assert split_sites(words) == (["CartPole-v1", "--seed", "3"], {"a": ["--gamma", "0.9"], "b": []})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--site"], "--site needs a name"),
        (["--site", "--gamma", "0.9"], "--site needs a name"),
        (["--site", "a", "--site", "a"], "--site a is given twice"),
        (["--site", "../a"], "--site ../a cannot be the name of a folder"),
        ([], "a federation needs sites"),
        (["--site", "a", "--run-dir", "x"], "--run-dir is the folder of the whole federation"),
        (["--rounds", "0", "--site", "a"], "--rounds must be at least 1, not 0"),
        (["--epsilon", "0", "--site", "a"], "--epsilon must be positive"),
        (["--strategy", "fedprox", "--site", "a", "--algo", "dqn"], "--strategy fedprox needs an algorithm with"),
        (["--share", "policy", "--site", "a", "--algo", "dqn"], "--share policy needs an algorithm with a critic"),
        (["--privacy", "local", "--send-as", "float16", "--site", "a"], "--privacy needs exact weights"),
        (["--server-momentum", "1", "--site", "a"], "--server-momentum must be at least 0 and below 1"),
        (["--listen", "s", "--site", "a"], "--listen is for a single site"),
        (["--site", "a", "--mode", "auto"], "sites of a federation need a mode"),
    ],
)
def test_mistakes_are_said_in_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    env = ["CartPole-v1", "--quiet"]
    assert main(["federate", *env, *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="Flower is installed")
def test_without_flower_a_sentence_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federate", *SMALL, "--run-dir", str(tmp_path / "f"), "--site", "a"]) == 2
    assert "freerun federate needs Flower" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()


def test_a_site_on_a_machine_of_its_own_can_be_resumed(tmp_path: Path) -> None:
    """The command that a SuperNode's site is started with, twice; this test is in the place of the SuperNode."""
    socket, run_dir = tmp_path / "s", tmp_path / "run"
    steps = []
    may_begin = threading.Event()  # or the second order might still reach the first run, which is about to end
    may_begin.set()

    def lead() -> None:
        link = SiteLink(socket, reach_seconds=30, answer_seconds=60)
        for _ in range(2):
            may_begin.wait(60)
            may_begin.clear()
            answer = link.train(link.describe().shared, 2)
            steps.append(answer.header["steps"])
            assert answer.header["site"] == "north"
            link.finish(answer.shared)

    leader = threading.Thread(target=lead)
    leader.start()
    listen = ["--listen", str(socket), "--name", "north"]
    assert main(["federate", *SMALL, "--total-steps", "5000", *listen, "--run-dir", str(run_dir)]) == 0
    may_begin.set()
    assert main(["federate", "--resume", str(run_dir), *listen]) == 0
    leader.join()
    summary = (run_dir / "summary.json").read_text(encoding="utf-8")
    assert '"updates": 4' in summary
    assert freerun.load_policy(run_dir) is not None
    assert len(steps) == 2


def test_options_of_a_federation_are_checked() -> None:
    with pytest.raises(UserError, match="--noise-multiplier must not be negative"):
        FederationOptions(noise_multiplier=-1.0)


def test_only_the_room_of_federations_imports_flower() -> None:
    source = Path(freerun.__file__).parent
    found = [path.relative_to(source) for path in source.rglob("*.py") if "flwr" in path.read_text(encoding="utf-8")]
    assert {path.parent.as_posix() for path in found} == {"tools/federation"}
