"""The files in deploy/: their shape is the documented one, and every command in them is one that the programs take."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from freerun.core import UserError
from freerun.settings.config import TrainConfig
from freerun.tools.cli.train_flags import Flags

yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
SEPARATORS = {";", "&", "&&", "|", "||", "(", ")", ">", ">>"}
ASSIGNMENT = re.compile(r"\w+=")
CPUS_PER_NODE = 4
NODES = ("first", "second", "third")


def read_yaml(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def commands_in(shell: str) -> Iterator[list[str]]:
    """Yield the commands of one line of shell, without assignments before them."""
    lexer = shlex.shlex(shell, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    command: list[str] = []
    for word in [*lexer, ";"]:
        if word in SEPARATORS:
            if command:
                yield command
            command = []
        elif command or not ASSIGNMENT.match(word):
            command.append(word)


def check(command: list[str]) -> TrainConfig[Any, Any] | None:
    """Parse a command with the parser of its own program, which raises if it does not take it; nothing is run."""
    program, *words = command
    if program == "freerun":
        assert words.pop(0) == "train"
        if "--resume" in words:  # its folder does not exist here
            return None
        config = Flags.read(words, None).config()
        assert isinstance(config, TrainConfig)
        return config
    if program == "ray":
        scripts: Any = pytest.importorskip("ray.scripts.scripts")
        scripts.cli.commands[words[0]].make_context(words[0], words[1:])
    return None


def checked(shell: str) -> list[TrainConfig[Any, Any]]:
    """Check all commands of one line of shell, also those that `ray exec` runs elsewhere."""
    found = []
    for command in commands_in(shell):
        if (config := check(command)) is not None:
            found.append(config)
        if command[:2] == ["ray", "exec"]:
            found += checked(command[-1])
    return found


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found.group(1)


@pytest.fixture(scope="module")
def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


def check_pip(command: list[str], extras: set[str]) -> None:
    assert "constraints.txt" in command[command.index("-c") + 1]
    for word in command:
        if named := re.fullmatch(r"\.\[(.+)\]", word):
            assert set(named.group(1).split(",")) <= extras
        if word.startswith("torch"):
            assert word == f"torch=={pinned('torch')}"


# ---------------------------------------------------------------------------------------------- what tells them apart


def test_commands_are_found_in_shell() -> None:
    shell = "ulimit -n 9; A=1 ray start --address=$HEAD:6379 && echo 'a; b' # c"
    assert list(commands_in(shell)) == [
        ["ulimit", "-n", "9"],
        ["ray", "start", "--address=$HEAD:6379"],
        ["echo", "a; b"],
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        "ray start --heads",
        "ray start --num-cpus=many",
        "ray go-up x",
        "freerun train CartPole-v1 --mode ray --ray-adress auto",
        "ray exec file 'freerun train CartPole-v1 --mode ray --ray-adress auto'",
    ],
)
def test_a_wrong_flag_is_found(wrong: str) -> None:
    click: Any = pytest.importorskip("click")
    with pytest.raises((click.UsageError, KeyError, UserError, SystemExit)):
        checked(wrong)


# ---------------------------------------------------------------------------------------------- a cloud


def test_the_cluster_file_has_the_shape_that_ray_wants() -> None:
    ray: Any = pytest.importorskip("ray")
    jsonschema: Any = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    (cluster,) = read_yaml("ray_aws.yaml")
    jsonschema.validate(cluster, schema)
    types = cluster["available_node_types"]
    assert cluster["head_node_type"] in types
    assert all(kind["min_workers"] <= kind["max_workers"] <= cluster["max_workers"] for kind in types.values())
    assert types[cluster["head_node_type"]]["resources"]["CPU"] == 0, "the learner has the head for itself"


def test_the_files_that_a_cloud_node_gets_are_there() -> None:
    (cluster,) = read_yaml("ray_aws.yaml")
    own = [path for path in cluster["file_mounts"].values() if not path.startswith("~")]
    assert {"constraints.txt", "pyproject.toml", "src"} <= set(own)
    assert [path for path in own if not (ROOT / path).exists()] == []


def test_the_commands_of_the_cluster_file_are_taken(extras: set[str]) -> None:
    (cluster,) = read_yaml("ray_aws.yaml")
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert any(line.startswith("ulimit") for line in cluster[name])
        for line in cluster[name]:
            checked(line)
    installs = [command for line in cluster["setup_commands"] for command in commands_in(line) if "pip" in command[0]]
    assert len(installs) == 2
    for command in installs:
        check_pip(command, extras)


# ---------------------------------------------------------------------------------------------- Kubernetes


def test_the_manifest_has_the_documented_shape() -> None:
    claim, job = read_yaml("kuberay_job.yaml")
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == pinned("ray")
    assert cluster["authOptions"] == {"mode": "token"}
    head = cluster["headGroupSpec"]
    (volume,) = head["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    for group in cluster["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (head, *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        parameters = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        check(["ray", "start", *parameters])


def test_the_run_of_the_manifest_fits_into_its_largest_cluster() -> None:
    _, job = read_yaml("kuberay_job.yaml")
    (config,) = checked(job["spec"]["entrypoint"])
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    num_cpus = group["maxReplicas"] * int(container["resources"]["limits"]["cpu"])
    assert (config.mode, config.num_workers) == ("ray", num_cpus)
    waiting, _ = commands_in(job["spec"]["entrypoint"])
    assert waiting[2] == str(num_cpus)
    (mount,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert str(config.run_dir).startswith(mount["mountPath"]), "the run folder outlasts the cluster"


# ---------------------------------------------------------------------------------------------- Slurm


def run_slurm_script(tmp_path: Path, rest_of_freerun: str = "") -> tuple[int, list[list[str]]]:
    """Return the exit code of the Slurm script, and what it called on three nodes: stand-ins write down their words."""
    assert subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=False).returncode == 0
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    written = tmp_path / "written"
    # One write per line: several programs write at the same time.
    record = f'#!/bin/bash\nline=$(printf "%s\\t" "${{0##*/}}" "$@")\necho "$line" >>"{written}"\n'
    # As the real one does, wait_for_cpus.py waits for all nodes.
    waiting = (
        f'if [[ "$1" == *wait* ]]; then until (($(grep -c ^ray "{written}") == {len(NODES)})); do sleep 0.1; done; fi\n'
    )
    stand_ins = {
        "ray": record,
        "freerun": record + rest_of_freerun,
        "python": record + waiting,
        "scontrol": f"#!/bin/bash\nprintf '%s\\n' {' '.join(NODES)}\n",
        # The options of srun begin with --; what follows is the program that it starts.
        "srun": '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n',
        "hostname": "#!/bin/bash\necho 127.0.0.1 10.0.0.9\n",
    }
    for name, text in stand_ins.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    # The script asks whether somebody listens where Ray's head would, so its port is one on which somebody does.
    with socket.create_server(("127.0.0.1", 0)) as head:
        script = (DEPLOY / "slurm.sh").read_text(encoding="utf-8").replace("6379", str(head.getsockname()[1]))
        environment = {
            **os.environ,
            "HOME": str(tmp_path),
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "nodes",
            "SLURM_CPUS_PER_TASK": str(CPUS_PER_NODE),
        }
        command = ["bash", "-c", script, "slurm.sh", "CartPole-v1", "--total-steps", "100"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert list((tmp_path / ".ray").iterdir()) == [], "the token is gone with the job"
    return done.returncode, [line.rstrip("\t\n").split("\t") for line in written.read_text().splitlines()]


def test_the_commands_of_the_slurm_script_are_taken(tmp_path: Path) -> None:
    exit_code, commands = run_slurm_script(tmp_path)
    assert exit_code == 0
    starts = [command for command in commands if command[0] == "ray"]
    assert sum("--head" in command for command in starts) == 1
    assert len(starts) == len(NODES)
    (config,) = [config for command in commands if (config := check(command)) is not None]
    num_cpus = (len(NODES) - 1) * CPUS_PER_NODE
    assert (config.mode, config.env, config.num_workers) == ("ray", "CartPole-v1", num_cpus)
    assert any(command[:3] == ["python", "deploy/wait_for_cpus.py", str(num_cpus)] for command in commands)


def test_the_slurm_script_passes_the_end_of_its_time_on_and_waits_for_the_run(tmp_path: Path) -> None:
    """Slurm signals the script, which is the parent of the run; the run then takes a while to write its checkpoint."""
    saving = f"trap 'sleep 1; touch {tmp_path}/saved; exit 130' TERM\n"
    saving += 'kill -TERM "$PPID"\nfor _ in {1..300}; do sleep 0.1; done\n'
    exit_code, _ = run_slurm_script(tmp_path, saving)
    assert exit_code == 130
    assert (tmp_path / "saved").exists()


# ---------------------------------------------------------------------------------------------- the container


def test_the_container_copies_what_is_there_and_installs_the_pinned_set(extras: set[str]) -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert instructions[0] == ["FROM", "python:3.11-slim"]
    sources = [source for name, words in instructions if name == "COPY" for source in words.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    installs = [command for name, words in instructions if name == "RUN" for command in commands_in(words)]
    installs = [command for command in installs if command[0] == "pip"]
    assert len(installs) == 2
    for command in installs:
        check_pip(command, extras)


# ---------------------------------------------------------------------------------------------- docs, and the helper


def test_the_commands_of_the_docs_are_taken() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"^```\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()]
    assert len([config for line in commands for config in checked(line)]) >= 3


@pytest.fixture(scope="module")
def wait_for_cpus() -> ModuleType:
    pytest.importorskip("ray")
    spec = importlib.util.spec_from_file_location("wait_for_cpus", DEPLOY / "wait_for_cpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cpus_are_waited_for(wait_for_cpus: ModuleType, ray_nodes: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The cluster of the tests has 8 CPUs and no autoscaler."""
    assert wait_for_cpus.main(["8", "--ray-address", ray_nodes.address]) == 0
    assert "the cluster has 8 CPUs" in capfd.readouterr().out
    assert wait_for_cpus.main(["9", "--ray-address", ray_nodes.address, "--timeout-seconds", "0"]) == 1
    assert "the cluster has 8 of 9 CPUs after 0 s" in capfd.readouterr().err
    assert wait_for_cpus.main(["0", "--ray-address", ray_nodes.address]) == 0
