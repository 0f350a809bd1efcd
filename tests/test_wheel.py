"""A wheel holds all that a user needs: it trains, watches and renders outside the clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from watch_server import Server

CLONE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has freerun from a wheel, and nothing else of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy of what git knows: setuptools would take over leftovers of `src/freerun.egg-info` and `build`.
    source = folder / "source"
    source.mkdir()
    tracked = subprocess.run(["git", "archive", "HEAD"], cwd=CLONE, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(source)], input=tracked, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(build, cwd=source, check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    interpreter = folder / "env" / "bin" / "python"
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # a wheel of pure Python is installed by unpacking it
        archive.extractall(packages)
    return interpreter


def environment() -> dict[str, str]:
    # The dependencies come from the tests' own environment. Its editable freerun is found by a .pth file, which Python
    # reads in site-packages alone and not in folders of PYTHONPATH.
    return {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}


def run(python: Path, folder: Path, *arguments: str) -> str:
    command = [str(python), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_trains_renders_and_shows_its_page_outside_the_clone(python: Path, tmp_path: Path) -> None:
    where = run(python, tmp_path, "-c", "import freerun; print(freerun.__file__)").strip()
    assert Path(where).is_relative_to(python.parents[1])
    flags = ("--total-steps", "3000", "--num-workers", "2", "--run-dir", "run")
    run(python, tmp_path, "-m", "freerun", "train", "CartPole-v1", *flags)
    run(python, tmp_path, "-m", "freerun", "eval", "run", "--episodes", "1", "--render", "film")
    assert any((tmp_path / "film").iterdir())
    command = [str(python), "-m", "freerun", "watch", "run", "--until-input-ends", "--port", "0"]
    pipe, folder, variables = subprocess.PIPE, tmp_path, environment()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder, env=variables) as process:
        assert process.stdout is not None
        server = Server(process.stdout.readline().strip(), process.pid)
        page = server.get("/").body.decode()
        # Its scripts and style sheets are in a wheel only if they were declared as data of the package.
        loaded = re.findall(r'(?:src|href)="(?:\./)?([\w/.-]+\.(?:js|css))', page)
        assert loaded
        assert [(path, server.get(f"/{path.lstrip('/')}").status) for path in loaded] == [
            (path, 200) for path in loaded
        ]
        process.communicate(timeout=20)


def test_other_libraries_make_the_built_in_environments(python: Path, tmp_path: Path) -> None:
    """As docs/own_environment.md says: Gymnasium imports the module that registers them, and no torch."""
    code = """
import sys, gymnasium
env = gymnasium.make("freerun.adapters.catalog:freerun/TMaze-v0")
env.reset(seed=0)
print(type(env.unwrapped).__name__, "torch" in sys.modules)
"""
    assert run(python, tmp_path, "-W", "error", "-c", code).split() == ["TMaze", "False"]
