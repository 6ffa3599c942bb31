"""The launch files of `recipes/launch`: their commands, environment and schemas."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from hf_cocodc.cli import coordinator, train
from hf_cocodc.cli.main import parse
from hf_cocodc.settings import RegionConfig
from hf_cocodc.settings import environment as variables
from hf_cocodc.settings.recipe import Recipe
from tests.processes.launching import environment

LAUNCH = Path(__file__).parents[2] / "recipes" / "launch"
QUICKSTART = "quickstart/diloco"
COORDINATOR = "10.0.0.1:29650"
OURS = {value for name, value in vars(variables).items() if name.startswith("ENV_")}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8")))


def check_coordinator(words: Sequence[str], port: int) -> None:
    """A coordinator that other machines reach, with a secret from a file."""
    options = parse(words)
    assert options.run is coordinator.run
    assert (options.port, options.insecure) == (port, False)
    assert options.host != "127.0.0.1"
    assert [Path(each).name for each in options.secret_file] == ["secret"]
    assert options.state.name == "coordinator.state"


def check_region(words: Sequence[str], env: Mapping[str, str], region: int, recipe: str = QUICKSTART) -> None:
    """A region that comes back with this command, and leaves alone at SIGTERM."""
    options = parse(words)
    assert options.run is train.run
    assert options.resume
    assert {key for key in env if key.startswith("HF_COCODC_")} <= OURS
    found = Recipe.load(recipe, options.overrides).regions
    told = {"HF_COCODC_REGION": str(options.region), "HF_COCODC_COORDINATOR": str(options.coordinator)}
    told["HF_COCODC_ON_LOSS"] = "auto"  # as the command says it to its process
    told = {key: value for key, value in told.items() if value != "None"}
    found = found.resolved({**told, **env})
    assert (found.region, found.coordinator) == (region, COORDINATOR)
    assert found.elastic and found.leaves_alone
    assert Path(found.secret_file or "").name == "secret"


class Machine:
    """A folder in which scripts run, with commands of our own on the PATH that write down how they were called.

    Args:
        folder: for the commands and what they write.
        code: exit code of `hf-cocodc`.
        waits: `hf-cocodc` ends only at SIGTERM.
        state: of the job, as Slurm says it.
    """

    def __init__(self, folder: Path, code: int = 0, waits: bool = False, state: str = "COMPLETING") -> None:
        self._folder = folder
        for name in ("hf-cocodc", "scontrol", "squeue", "pip"):
            wait = "signal.sigwait({signal.SIGTERM})" if waits and name == "hf-cocodc" else ""
            (folder / name).write_text(
                f"#!{sys.executable} -S\nimport json, signal, sys\n"
                f"signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})\n"
                f"open(__file__ + '.called', 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n{wait}\n"
                f"print({state if name == 'squeue' else ''!r})\n"
                f"sys.exit({code if name == 'hf-cocodc' else 0})\n"
            )
            (folder / name).chmod(0o755)

    def start(self, words: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen:
        path = f"{self._folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(words, cwd=self._folder, env={**environment(), **env, "PATH": path})

    def run(self, words: Sequence[str], env: Mapping[str, str]) -> int:
        return self.start(words, env).wait(timeout=60)

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of a command."""
        written = self._folder / f"{name}.called"
        return [json.loads(line) for line in written.read_text().splitlines()] if written.is_file() else []


def region_script(code: int, seconds: int, restarts: str, folder: Path) -> tuple[Machine, int]:
    machine = Machine(folder, code)
    words = [
        "bash",
        str(LAUNCH / "slurm" / "region.sbatch"),
        "r.yaml",
        "1",
        COORDINATOR,
        "--set",
        "outer.outer_lr=0.5",
    ]
    return machine, machine.run(
        words, {"SLURM_JOB_ID": "7", "SECONDS": str(seconds), "SLURM_RESTART_COUNT": restarts}
    )


@pytest.mark.parametrize(
    ("code", "seconds", "restarts", "again"),
    [
        (0, 2000, "", False),
        (1, 2000, "9", True),
        (1, 0, "", True),
        (1, 0, "5", False),
        (137, 0, "4", True),
        (137, 2000, "5", True),
        (2, 2000, "", False),
        (3, 2000, "", False),
        (143, 2000, "", False),
    ],
)
def test_the_slurm_job_of_a_region(
    code: int, seconds: int, restarts: str, again: bool, tmp_path: Path
) -> None:
    """It runs our command with its arguments, ends with its exit code, and is queued again where that can help."""
    machine, ended = region_script(code, seconds, restarts, tmp_path)
    [words] = machine.calls("hf-cocodc")
    assert words[:2] == ["train", "r.yaml"]
    assert words[-2:] == ["--set", "outer.outer_lr=0.5"]
    check_region(words, {}, 1)
    assert ended == code
    assert machine.calls("scontrol") == ([["requeue", "7"]] if again else [])


def wait_for_call(machine: Machine) -> None:
    deadline = time.monotonic() + 60
    while not machine.calls("hf-cocodc") and time.monotonic() < deadline:
        time.sleep(0.01)


def signaled_early(folder: Path, sent: signal.Signals) -> dict[str, str]:
    """An environment in which a script of bash gets a signal after it has started a command and before it knows its number."""
    trap = f'case $BASH_COMMAND in "command=$"*) trap - DEBUG; kill -{sent.value} $$;; esac'
    (folder / "early").write_text(f"trap {shlex.quote(trap)} DEBUG\n")
    return {"BASH_ENV": str(folder / "early")}


@pytest.mark.parametrize(
    ("sent", "state", "again"),
    [
        (signal.SIGUSR1, "RUNNING", True),
        (signal.SIGTERM, "RUNNING", True),  # a preemption with GraceTime
        (signal.SIGTERM, "COMPLETING", False),  # scancel
    ],
)
def test_the_slurm_job_of_a_region_leaves_before_its_time_is_over(
    sent: signal.Signals, state: str, again: bool, tmp_path: Path
) -> None:
    """It waits until the region has left, and comes back. A job that is canceled does not."""
    machine = Machine(tmp_path, 0, waits=True, state=state)
    words = ["bash", str(LAUNCH / "slurm" / "region.sbatch"), "r.yaml", "1", COORDINATOR]
    job = machine.start(words, {"SLURM_JOB_ID": "7"})
    wait_for_call(machine)
    job.send_signal(sent)
    assert job.wait(timeout=60) == 0
    assert machine.calls("scontrol") == ([["requeue", "7"]] if again else [])
    assert "#SBATCH --signal=B:USR1@" in (LAUNCH / "slurm" / "region.sbatch").read_text()


def test_the_slurm_job_of_a_region_that_leaves_as_soon_as_it_begins(tmp_path: Path) -> None:
    """A signal that comes while the command starts is passed on to it, too."""
    machine = Machine(tmp_path, waits=True)
    words = ["bash", str(LAUNCH / "slurm" / "region.sbatch"), "r.yaml", "1", COORDINATOR]
    env = {"SLURM_JOB_ID": "7", **signaled_early(tmp_path, signal.SIGUSR1)}
    assert machine.run(words, env) in (0, 128 + signal.SIGTERM)
    assert machine.calls("scontrol") == [["requeue", "7"]]


def test_the_slurm_job_of_the_coordinator(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.run(["bash", str(LAUNCH / "slurm" / "coordinator.sbatch"), "node1"], {}) == 0
    [words] = machine.calls("hf-cocodc")
    check_coordinator(words, 29650)


@pytest.mark.parametrize(("gpus", "processes"), [("8", 32), (None, 4)])
def test_the_slurm_job_of_all_regions(gpus: str | None, processes: int, tmp_path: Path) -> None:
    """One launcher on each node: all know the first node, a port and their own number, and each node becomes a region."""
    for name, body in {
        "scontrol": 'printf "node%s\\n" 7 8 9 10',
        "srun": 'while [ "$1" != bash ]; do shift; done; for SLURM_NODEID in 0 1 2 3; do export SLURM_NODEID; "$@"; done',
        "hf-cocodc": 'printf "%s\\0" "$@" >"called-$SLURM_NODEID"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_JOB_ID": "40007", "SLURM_JOB_NODELIST": "node[7-10]", "SLURM_NNODES": "4"}
    env |= {} if gpus is None else {"SLURM_GPUS_ON_NODE": gpus, "SLURM_CPUS_PER_TASK": "64"}
    env |= {"ACCELERATE_OPTIONS": "--mixed_precision bf16"}
    words = ["bash", str(LAUNCH / "slurm" / "machines.sbatch"), "a b.py", "--lr", "1"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(words, cwd=tmp_path, env={**environment(), **env, "PATH": path}, check=True, timeout=60)
    for node in range(4):
        ours = parse((tmp_path / f"called-{node}").read_text().split("\0")[:-1])
        assert (ours.split, ours.resume, ours.program) == ("machines", True, ["a b.py", "--lr", "1"])
        found = launch_command_parser().parse_args([*ours.launcher, *ours.program])
        assert (found.num_machines, found.machine_rank, found.num_processes) == (4, node, processes)
        assert (found.main_process_ip, found.main_process_port) == ("node7", 10007)
        assert (found.multi_gpu, found.mixed_precision) == (True, "bf16")


@pytest.mark.parametrize("name", ["coordinator", "region"])
def test_a_manifest_is_what_kubernetes_takes(name: str, tmp_path: Path) -> None:
    """By its own schemas, without a field that it does not know; and our commands are what they were."""
    found = documents(f"kubernetes/{name}.yaml")
    for each in found:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    pod = found[0]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    machine = Machine(tmp_path)
    assert machine.run([*container["command"], *container.get("args", [])], {}) == 0
    [words] = machine.calls("hf-cocodc")
    volumes = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    if name == "coordinator":
        service = found[1]
        assert service["spec"]["selector"] == found[0]["spec"]["template"]["metadata"]["labels"]
        [port] = service["spec"]["ports"]
        check_coordinator(words, port["port"])
        return
    service = documents("kubernetes/coordinator.yaml")[1]
    env = {each["name"]: each["value"] for each in container["env"]}
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert env["HF_COCODC_COORDINATOR"] == address
    check_region(words, {**env, "HF_COCODC_COORDINATOR": COORDINATOR}, 0)
    low, high = map(int, pod["securityContext"]["sysctls"][0]["value"].split())
    assert 1024 <= low < high


@pytest.mark.parametrize(
    ("code", "told", "action"),
    [
        (0, False, None),  # the Job is complete
        (0, True, "Ignore"),  # it has left: another pod comes back
        (143, True, "Ignore"),  # it was the last region, and has saved
        (1, False, "Count"),
        (2, False, "FailJob"),
        (3, False, "FailJob"),
    ],
)
def test_the_pod_of_a_region(code: int, told: bool, action: str | None, tmp_path: Path) -> None:
    """What Kubernetes does after its exit code. At SIGTERM it waits until the region has left, and fails: so it comes back."""
    machine = Machine(tmp_path, code, waits=told)
    spec = documents("kubernetes/region.yaml")[0]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    pod = machine.start([*container["command"], *container["args"]], {})
    if told:
        wait_for_call(machine)
        pod.send_signal(signal.SIGTERM)
    ended = pod.wait(timeout=60)
    assert ended == (128 + signal.SIGTERM if told else code)
    rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
    actions = [rule["action"] for rule in rules if ended in rule["onExitCodes"]["values"]]
    assert (actions or ["Count"])[0] == action if ended else action is None


def test_the_pod_of_a_region_that_leaves_as_soon_as_it_begins(tmp_path: Path) -> None:
    """A signal that comes while the command starts is passed on to it, too."""
    [container] = documents("kubernetes/region.yaml")[0]["spec"]["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    machine = Machine(tmp_path, waits=True)
    assert machine.run(words, signaled_early(tmp_path, signal.SIGTERM)) == 128 + signal.SIGTERM


@pytest.mark.parametrize("name", ["coordinator", "region"])
def test_a_skypilot_file_runs_our_commands(name: str, tmp_path: Path) -> None:
    """What is under `run`, with the environment under `envs`; values that are null come with --env."""
    [task] = documents(f"skypilot/{name}.yaml")
    assert task["setup"].split() == ["pip", "install", "."]
    assert task["file_mounts"] == {"~/secret": "./secret"}
    given = {"HF_COCODC_REGION": "3", "HF_COCODC_COORDINATOR": COORDINATOR}
    envs = task.get("envs", {})
    assert {key for key, value in envs.items() if value is None} == (set(given) if envs else set())
    env = {key: given.get(key, str(value)) for key, value in envs.items()}
    machine = Machine(tmp_path)
    assert machine.run(["bash", "-c", task["run"]], env) == 0
    [words] = machine.calls("hf-cocodc")
    if name == "coordinator":
        check_coordinator(words, 29650)
    else:
        assert words[1] == env.pop("RECIPE")
        check_region(words, env, 3, str(LAUNCH.parents[1] / words[1]))


@pytest.mark.parametrize("name", ["coordinator", "region"])
@pytest.mark.filterwarnings("ignore")
def test_a_skypilot_file_is_what_its_parser_takes(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SkyPilot's own parser, which refuses keys that it does not know."""
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky", reason="skypilot is not installed; it is too heavy for an extra of ours")
    [task] = documents(f"skypilot/{name}.yaml")
    given = [(key, "0") for key, value in task.get("envs", {}).items() if value is None]
    parsed = sky.Task.from_yaml_config(task, env_overrides=given)
    assert "hf-cocodc" in parsed.run


def submitted(folder: Path) -> list[str]:
    """How the launch file of Hugging Face Jobs calls their command."""
    machine = Machine(folder)
    (folder / "hf-cocodc").rename(folder / "hf")
    words = ["bash", str(LAUNCH / "jobs" / "region.sh"), "1", "--set", "outer.outer_lr=0.5"]
    assert machine.run(words, {"BUCKET": "me/run7", "HF_COCODC_SECRET": "hidden", "FLAVOR": "t4-small"}) == 0
    [call] = machine.calls("hf")
    return call


def test_a_hugging_face_job_is_a_region_that_meets_in_the_bucket(tmp_path: Path) -> None:
    """It installs what lies in the bucket, trains, and copies its model back; the secret is on no command line."""
    *options, shell, flag, script, name, option, override = submitted(tmp_path)
    assert (shell, flag) == ("bash", "-c")
    assert not any("hidden" in word for word in [*options, script])
    env = dict(value.split("=", 1) for value in options_of(options, "--env"))
    assert env["BUCKET"] == "me/run7"
    assert options_of(options, "--secrets") == ["HF_TOKEN", "HF_COCODC_SECRET"]
    job = tmp_path / "job"
    (job / "runs" / "job" / "region-1").mkdir(parents=True)
    machine = Machine(job)
    (job / "hf").symlink_to(job / "pip")
    assert machine.run([shell, flag, script, name, option, override], env) == 0
    assert machine.calls("pip")[0] == ["install", "-q", "/bucket/*.whl"]
    [words] = machine.calls("hf-cocodc")
    given = parse([words[0], QUICKSTART, *words[2:]])
    assert words[1] == "/bucket/recipe.yaml"
    assert given.run is train.run and given.resume
    found = Recipe.load(QUICKSTART, given.overrides)
    ours = {key: value for key, value in env.items() if key != "BUCKET"}
    assert {*ours} <= OURS
    regions = found.regions.resolved(
        {**ours, "HF_COCODC_ON_LOSS": "auto"}
    )  # as the command says it to its process
    assert (regions.region, regions.coordinator) == (1, "hf://buckets/me/run7/meeting")
    assert regions.elastic and found.outer.outer_lr == 0.5
    [copied] = machine.calls("hf")
    assert copied[-2:] == [f"{found.training['output_dir']}/region-1", "hf://buckets/me/run7/models/region-1"]


def options_of(words: Sequence[str], name: str) -> list[str]:
    return [value for option, value in zip(words, words[1:], strict=False) if option == name]


def test_a_hugging_face_job_is_what_their_command_takes(tmp_path: Path) -> None:
    """The installed one, which only shows what it would submit."""
    hf = [sys.executable, "-m", "huggingface_hub.cli.hf"]
    env = {**os.environ, "HF_TOKEN": "hf_none", "HF_COCODC_SECRET": "hidden", "HF_HUB_OFFLINE": "1"}
    told = subprocess.run([*hf, "jobs", "run", "--help"], env=env, capture_output=True, text=True, timeout=60)
    if "--volume" not in told.stdout or "--dry-run" not in told.stdout:
        pytest.skip("this huggingface_hub mounts no buckets in jobs, or has no --dry-run for them")
    _, _, *rest = submitted(tmp_path)
    words = [*hf, "jobs", "run", "--dry-run", *rest]
    shown = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "hf://buckets/me/run7:/bucket:ro" in shown.stdout + shown.stderr


def test_the_guides_lines_are_ours() -> None:
    """Its commands exist with their options, and so do the files and settings that it names."""
    text = (LAUNCH.parents[1] / "docs" / "guides" / "launchers.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    lines = [words for line in blocks.splitlines() if (words := shlex.split(line, comments=True))]
    for words in lines:
        if words[0] == "hf-cocodc":
            parse(words[1:])
    files = {word for words in lines for word in words if word.startswith("recipes/launch/")}
    assert files == {
        f"recipes/launch/{path.relative_to(LAUNCH).as_posix()}"
        for path in LAUNCH.rglob("*")
        if path.suffix in (".sbatch", ".yaml", ".py", ".sh")
    }
    assert all((LAUNCH.parents[1] / name).is_file() for name in files)
    assert set(re.findall(r"`regions\.(\w+)", text)) <= set(RegionConfig.__dataclass_fields__)
