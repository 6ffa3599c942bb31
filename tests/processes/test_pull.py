"""`hf-cocodc pull` while regions train, as processes of their own."""

from __future__ import annotations

import platform
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cocodc.cli.main import main
from hf_cocodc.coordinator.caller import CoordinatorConnection
from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.messages import Given, Pull
from hf_cocodc.run.journal import read
from tests.coordinator.regions import OURS, SECRET
from tests.processes.coming_worker import HURRY, step_of
from tests.processes.forks import wait_until
from tests.processes.pull_worker import RUN, loop, trainer
from tests.processes.test_coming_and_going import Run
from tests.secret import secret
from tests.toys import llama

STEPS = 30


@contextmanager
def training(folder: Path, body: Callable[..., None], *arguments: Any, **more: Any) -> Iterator[Run]:
    """Two regions that train; they hurry to their end at the end of the block."""
    folder.mkdir(exist_ok=True)
    run = Run(folder, 2, body, STEPS, *arguments, **more)
    run.wait_for_step(0, 5)
    yield run
    (folder / HURRY).touch()
    for region in (0, 1):
        run.processes[region].join(60)
        assert run.processes[region].exitcode == 0, run.log(region).read_text()[-4000:]


def end_of(folder: Path) -> torch.Tensor:
    """The model that both regions have at the end."""
    ends = [torch.load(folder / f"end-{region}.pt") for region in (0, 1)]
    assert torch.equal(*ends)
    return ends[0]


def pull(run: Run, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> int:
    """Pull by the command; returns the inner step that it names."""
    assert main(["pull", "--coordinator", run.coordinator.address, str(out), *options]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(
        rf"run '{RUN}': the global model of inner step (\d+) \(outer steps: .+\) of 2 regions, from region 0: "
        rf".+ in [0-9.]+ s, in {re.escape(str(out))}",
        line,
    )
    assert found, line
    return int(found[1])


def members(run: Run) -> list[tuple[int, int]]:
    [state] = status(run.coordinator.address, None, RUN)
    return [(each["region"], each["ticket"]) for each in state["members"]] + state["newcomers"]


@pytest.mark.parametrize(
    ("method", "saves"), [("diloco", 4), pytest.param("streaming", 1, marks=pytest.mark.slow)]
)
def test_what_is_pulled_is_the_global_model_of_a_checkpoint_and_changes_no_number(
    method: str, saves: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice: byte for byte the model of the checkpoint after the same landings, and it can be loaded. The regions end as
    without it.
    """
    steps = []
    with training(tmp_path / "run", trainer, method, saves=saves) as run:
        before = members(run)
        for out in (tmp_path / "first", tmp_path / "second"):
            steps.append(pull(run, out, capsys))
        assert members(run) == before
        assert step_of(run.folder, 0) < STEPS - 1  # the regions have not waited for the end
    assert steps[0] < steps[1] < STEPS
    for step, out in zip(steps, (tmp_path / "first", tmp_path / "second"), strict=True):
        checkpoint = run.folder / "out" / "region-0" / f"checkpoint-{step - step % saves}"
        names = {path.name for path in out.iterdir()}
        assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
        for name in names - {"README.md"}:
            assert (out / name).read_bytes() == (checkpoint / name).read_bytes(), name
        AutoModelForCausalLM.from_pretrained(out)
        assert AutoTokenizer.from_pretrained(out)("w7")["input_ids"] == [7]
    assert not [*(run.folder / "out" / "region-0" / "cocodc").glob("pulled*")]
    assert not [*tmp_path.glob(".*")]
    events = read(run.folder / "out" / "region-0" / "cocodc" / "journal.jsonl")
    assert [each["step"] for each in events if each["kind"] == "pull"] == steps
    with training(tmp_path / "alone", trainer, method) as alone:
        (alone.folder / HURRY).touch()
    assert torch.equal(end_of(run.folder), end_of(alone.folder))


def test_pullers_that_die_or_stall_cost_an_elastic_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One goes in the middle, one takes nothing, and a third gets the global params of a plain loop meanwhile, bit for bit."""
    with training(tmp_path / "run", loop, "diloco", min=1) as run:
        before = members(run)
        stalled, dead = (
            CoordinatorConnection(run.coordinator.address, RUN, "command", None) for _ in range(2)
        )
        for each in (stalled, dead):
            each.send(Pull())
        while not isinstance(message := dead.receive(20), Given):
            assert message is not None
        assert dead.receive_bytes(1000, 20)
        dead.drop()
        step = pull(run, tmp_path / "out", capsys)
        assert members(run) == before
    stalled.drop()
    pulled = load_file(tmp_path / "out" / "model.safetensors")
    held = load_file(run.folder / f"global-{step}.safetensors")
    assert pulled.keys() == held.keys()
    assert all(torch.equal(pulled[name], held[name]) for name in held)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with training(tmp_path / "alone", loop, "diloco", min=1) as alone:
        (alone.folder / HURRY).touch()
    assert torch.equal(end_of(run.folder), end_of(alone.folder))


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_region_of_two_ranks_gives_its_whole_model(
    is_sharded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DDP and FSDP2: at a landing, where its ranks speak with each other; byte for byte that of the checkpoint."""
    body = partial(trainer, is_sharded=is_sharded)
    with training(tmp_path / "run", body, "diloco", saves=4, ranks=2) as run:
        step = pull(run, tmp_path / "out", capsys)
    assert step % 4 == 0
    checkpoint = run.folder / "out" / "region-0" / f"checkpoint-{step}"
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    end_of(run.folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's: names of transformers 4
def test_an_adapter_comes_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LoRA, with a secret."""
    (tmp_path / "secret").write_text(secret(OURS))
    (tmp_path / "secret").chmod(0o600)
    body = partial(trainer, adapter=True, secret_file=str(tmp_path / "secret"))
    with training(tmp_path / "run", body, "diloco", saves=4, secrets=[SECRET]) as run:
        step = pull(run, tmp_path / "out", capsys, "--secret-file", str(tmp_path / "secret"))
    checkpoint = run.folder / "out" / "region-0" / f"checkpoint-{step - step % 4}"
    weights = [load_file(each / "adapter_model.safetensors") for each in (tmp_path / "out", checkpoint)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(each.any() for name, each in weights[0].items() if "lora_B" in name)  # it has been trained
    assert not (tmp_path / "out" / "model.safetensors").exists()
    PeftModel.from_pretrained(llama(layers=2), tmp_path / "out")


@pytest.mark.slow
def test_a_run_that_ends_waits_for_no_puller_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says where the last model lies; the region ends as ever, and its folder has no part of what was sent."""
    codes: list[int] = []
    body = partial(trainer, is_slow=True, rate_limit=8.0)
    with training(tmp_path / "run", body, "diloco") as run:
        command = ["pull", "--coordinator", run.coordinator.address, str(tmp_path / "out")]
        pulling = threading.Thread(target=lambda: codes.append(main(command)))
        pulling.start()
        wait_until(lambda: bool([*tmp_path.glob(".out.*/model/*")]), run.processes[0], run.log(0))
    pulling.join(60)
    assert codes == [1]
    error = capsys.readouterr().err
    assert f"If the run has ended, its model is below {platform.node()}:{run.folder / 'out'}" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert not [*(run.folder / "out" / "region-0" / "cocodc").glob("pulled*")]
    end_of(run.folder)
