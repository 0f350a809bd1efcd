"""Run folders from elsewhere run no code unless the user names it, and no run folder contains a secret."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import freerun
from freerun.core import EnvFailure, UserError
from freerun.persistence import redaction, trust
from freerun.settings.named_code import code_in
from freerun.tools.cli.main import main

QUICK: dict[str, Any] = {"total_episodes": 4, "episodes_per_update": 2, "quiet": True, "mode": "sequential"}


@pytest.fixture
def own_run(run_dir: Path) -> Path:
    freerun.train("toy_envs:OneBit", run_dir=run_dir, **QUICK)
    return run_dir


def commands(run_dir: Path, *more: str) -> list[list[str]]:
    return [
        ["eval", str(run_dir), "--episodes", "1", *more],
        ["replay", str(run_dir), *more],
        ["train", "--resume", str(run_dir), "--total-episodes", "6", "-q", *more],
        ["train", "--config", str(run_dir / "config.json"), "--run-dir", str(run_dir.with_name("again")), *more],
    ]


def test_a_run_of_ones_own_needs_no_word(own_run: Path) -> None:
    for words in commands(own_run):
        assert main(words) == 0, words


def test_a_run_from_elsewhere_runs_no_code_that_is_not_named_again(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody else"))
    for words in commands(own_run):
        assert main(words) == 2, words
        assert "names code to run: toy_envs:OneBit. If you know it and trust it" in capsys.readouterr().err
    for words in commands(own_run, "--trust", "toy_envs:OneBit"):
        assert main(words) == 0, words
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a third"))
    with pytest.raises(UserError, match="--trust toy_envs:OneBit"):
        freerun.resume(own_run, trust=["toy_envs:Other"])
    assert freerun.load_policy(own_run).weights.size, "an MLP is numbers, not code"


def test_what_was_slipped_into_ones_own_folder_does_not_run(
    own_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that somebody has changed is not the user's any more: `leave_a_mark` would run."""
    mark = tmp_path / "mark"
    config = json.loads((own_run / "config.json").read_text())
    config |= {"env": "toy_envs:leave_a_mark", "env_args": {"command": str(mark)}}
    (own_run / "config.json").write_text(json.dumps(config))
    for words in commands(own_run):
        if "--resume" not in words:  # it takes the checkpoint's own word, which is hashed
            assert main(words) == 2, words
            assert "names code to run" in capsys.readouterr().err
    assert not mark.exists()
    config["env_args"] = {"env_id": "toy_envs:leave_a_mark"}
    assert "toy_envs:leave_a_mark" in code_in(config)


def test_the_network_of_a_policy_is_that_of_the_settings(run_dir: Path) -> None:
    freerun.train("CartPole-v1", network="toy_networks:layered", run_dir=run_dir, **QUICK)
    path = run_dir / "policy.safetensors"
    arrays = load_file(path)
    assert freerun.load_policy(run_dir).weights.size
    import safetensors

    with safetensors.safe_open(path, "numpy") as file:
        about = json.loads(file.metadata()["freerun"])
    about["network"] = "toy_envs:leave_a_mark"
    save_file(arrays, path, {"freerun": json.dumps(about)})
    with pytest.raises(UserError, match="of another network"):
        freerun.load_policy(run_dir)


def test_built_in_names_are_not_code() -> None:
    assert code_in({"env": "CartPole-v1", "termination": "hopper", "env_args": {"n": 3}, "ray_address": "local"}) == []
    named = {"env": "my:Env", "network": "n:N", "termination": "t:T", "cyborg_path": "/x", "ray_address": "h:6379"}
    assert code_in(named) == ["/x", "h:6379", "my:Env", "n:N", "t:T"]


def test_the_key_is_for_the_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    trust.sign(tmp_path, ["my:Env"])
    path = tmp_path / "freerun" / "key"
    key = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key.hex() not in (tmp_path / ".origin").read_text()
    trust.check(["my:Env"], tmp_path)
    assert path.read_bytes() == key, "the key is made once"


def test_secrets_are_in_no_file_and_must_be_given_again(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret, url = "hunter2-and-more", "https://me:hunter3@example.org/x"
    env_args = {"api_token": secret, "url": url}
    freerun.train("toy_envs:WithToken", env_args=env_args, run_dir=run_dir, **{**QUICK, "checkpoint_every": "1"})
    for path in run_dir.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert secret.encode() not in content, path
            assert b"hunter3" not in content, path
    assert json.loads((run_dir / "config.json").read_text())["env_args"]["api_token"] == "(a secret: not kept)"
    words = ["train", "--resume", str(run_dir), "--total-episodes", "6", "-q"]
    assert main(words) == 2
    assert "--env-args api_token is a secret, which no file keeps" in capsys.readouterr().err
    assert main([*words, "--env-args", "api_token", secret, "url", url]) == 0


def test_secrets_of_the_environment_and_numbers_are_hidden_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    options = {
        "env_args": {"password": 12345, "num_tokens": 7, "note": "0123456789abcdef", "quick": "false", "api_key": True},
        "wandb_group": "0123456789abcdef",
        "ray_address": "ray://me:hunter3@host:10001",
        "env": "CartPole-v1",
    }
    kept = redaction.without_secrets(options)
    hidden = redaction.HIDDEN
    assert kept["env_args"] == {
        "password": hidden,
        "num_tokens": 7,
        "note": hidden,
        "quick": "false",
        "api_key": True,
    }
    assert (kept["wandb_group"], kept["ray_address"], kept["env"]) == (hidden, hidden, "CartPole-v1")
    with pytest.raises(UserError, match="--wandb-group holds a secret"):
        redaction.refuse_redacted({"wandb_group": hidden})
    redactor = redaction.SecretRedactor(options)
    assert redactor.has_secrets
    text = redactor.redact("cannot reach https://you:pw@example.org/x with 0123456789abcdef after 12345 tries")
    assert text == f"cannot reach https://{hidden}@example.org/x with {hidden} after 12345 tries"
    assert not redaction.SecretRedactor({"env_args": {"n": 3}}).has_secrets


def test_an_error_that_holds_a_secret_is_covered_wherever_it_is_written(run_dir: Path) -> None:
    secret = "hunter2-and-more"
    with pytest.raises(EnvFailure, match=secret):
        freerun.train("toy_envs:Babbles", env_args={"api_token": secret}, run_dir=run_dir, **QUICK)
    texts = {path.name: path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file()}
    assert not [name for name, text in texts.items() if secret in text]
    for name in ("log.txt", "incidents.jsonl", "summary.json"):
        assert f"refused: {redaction.HIDDEN}" in texts[name], name
