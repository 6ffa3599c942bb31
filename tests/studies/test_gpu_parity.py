"""DiLoCo beside data-parallel training on one GPU: its text, its equal tokens, its table; all of it at a reduced size."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.errors import InputError
from tests.far import FAR
from tests.studies import corpus, gpu_parity, training
from tests.studies.inner import Inner, loss_of
from tests.studies.text import Tokens
from tests.studies.toys import settings

ROOT = Path(__file__).parents[2]
TINY = gpu_parity.SIZES["tiny"]
ARMS = [gpu_parity.PARALLEL, *gpu_parity.REGIONS]


def _words(seed: int, count: int) -> str:
    generator = random.Random(seed)
    return " ".join(f"word{generator.randrange(500)}" for _ in range(count))


def _tokens() -> Tokens:
    generator = torch.Generator().manual_seed(1)
    train, held_out = (torch.randint(512, (each,), generator=generator).short() for each in (4000, 600))
    return Tokens(train, held_out, TINY.vocabulary)


def test_the_text_does_not_depend_on_where_files_lie(tmp_path: Path) -> None:
    """Each different document counts once, from a packed file too; what is no text, too short or too long is left out."""
    here, there = tmp_path / "a", tmp_path / "b" / "site-packages"
    texts = [_words(seed, 200) for seed in range(40)]
    for number, text in enumerate(texts):
        for folder, name in ((here, f"m{number}.py"), (there, f"deep/{99 - number}.md")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    (here / "again.txt").write_text(texts[3])
    (here / "packed.txt.gz").write_bytes(
        gzip.compress(texts[4].encode())
    )  # in packages only manuals are unpacked
    (here / "short.py").write_text("x = 1")
    (here / "long.py").write_text("x = 1\n" * 2**18)
    (here / "latin.txt").write_bytes("é".encode("latin-1") * 300)
    (here / "zero.c").write_bytes(b"\0" * 300)
    (here / "picture.png").write_text(_words(77, 200))
    (here / "site-packages").mkdir()
    (here / "site-packages" / "inside.py").write_text(_words(78, 200))
    one, other = (corpus.documents([folder], 1000, 10**6) for folder in (here, there))
    assert one == other
    assert sorted([*one.train, *one.held_out]) == sorted(texts)
    assert one.held_out and not set(one.held_out) & set(one.train)
    less = corpus.documents([here], 1000, one.found // 2)
    assert less.size <= one.found // 2 and less.found == one.found
    assert less.digest != one.digest
    (here / "m0.py").write_text(_words(79, 200))
    assert corpus.documents([here], 1000, 10**6).digest != one.digest


def test_manuals_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of manuals every file may be text, whatever its name ends with."""
    monkeypatch.setattr(corpus, "MANUALS", (str(tmp_path / "man"),))
    (tmp_path / "man1").mkdir()
    (tmp_path / "man1" / "ls.1.gz").write_bytes(gzip.compress(_words(1, 100).encode()))
    (tmp_path / "man1" / "broken.1.gz").write_bytes(gzip.compress(_words(2, 100).encode())[:40])
    (tmp_path / "de").mkdir()
    assert corpus.machine()[-1] == tmp_path / "man1"
    found = corpus.documents(corpus.machine()[-1:], 1, 10**6)
    assert [*found.train, *found.held_out] == [_words(1, 100)]


def test_too_little_text_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The size at which the figures mean something asks for 200 MB, and says how much there was. So does a GPU that is none."""
    monkeypatch.setattr(gpu_parity, "machine", lambda: [tmp_path])
    assert gpu_parity.main(["--device", "cpu", "--output", str(tmp_path)]) == 2
    assert (
        f"error: 0 MB of different text in {tmp_path}: this size needs 200 MB. Name more"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_parity.main(["--size", "tiny", "--device", "cuda", "--output", str(tmp_path)]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_same_documents_give_the_same_tokens(tmp_path: Path) -> None:
    """Two tokenizers of one text are equal, their tokens are the text, and a second call reads what the first has kept."""
    for number in range(12):
        (tmp_path / f"{number}.py").write_text(_words(number, 300) + "\n    é = '漢'\n")
    found, said = corpus.documents([tmp_path], 1000, 10**6), list[str]()
    made = [corpus.corpus_of(found, 300, 2000, tmp_path / each, said.append) for each in ("a", "b", "a")]
    assert len(said) == 2
    for other in made[1:]:
        assert other[1:] == made[0][1:]
        assert all(map(torch.equal, other.tokens[:2], made[0].tokens[:2]))
    tokenizer = corpus.tokenizer_of(found.train, 300, 2000)
    train = made[0].tokens.train
    assert train.dtype == torch.int16 and train.min() >= 0 and train.max() < made[0].tokens.vocabulary
    documents = tokenizer.decode(train.tolist(), skip_special_tokens=False).split(corpus.END)
    assert documents == [*found.train, ""]


def test_all_arms_train_on_the_same_tokens(batches: dict[int, list[Tensor]]) -> None:
    """In every inner step, one, two and four regions together have the batch of data-parallel training, and the same start."""
    trained: dict[str, dict[int, list[Tensor]]] = {}
    size = replace(TINY, training={**TINY.training, "max_steps": 4, "eval_steps": 2, "warmup_steps": 0})
    found = {}
    for arm in ARMS:
        found[arm] = training.run(gpu_parity.settings_of(size, arm, 1, []), _tokens())
        trained[arm] = dict(batches)
        batches.clear()
    for step in range(4):
        (whole,) = trained[gpu_parity.PARALLEL][step]
        assert whole.shape == (8, TINY.block)
        for arm, regions in gpu_parity.REGIONS.items():
            parts = trained[arm][step]
            assert len(parts) == regions
            assert sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())
    gpu_parity.check_pairs({arm: {1: each} for arm, each in found.items()})
    assert len({tuple(found[arm]["curve"]) for arm in ARMS}) == len(ARMS)


def test_what_does_not_concern_data_parallel_training_does_not_repeat_it() -> None:
    """Its runs are those of any outer values; those of regions are others. A batch that regions cannot share is refused."""
    plain, changed = (
        {arm: gpu_parity.settings_of(TINY, arm, 1, each) for arm in ARMS}
        for each in ([], ["outer.outer_momentum=0.9"])
    )
    assert [arm for arm in ARMS if plain[arm] == changed[arm]] == [gpu_parity.PARALLEL]
    longer = gpu_parity.settings_of(TINY, "two regions", 1, ["training.max_steps=80"])
    assert longer["training"]["max_steps"] == 80 and TINY.training["max_steps"] == 40
    with pytest.raises(InputError, match="a multiple of 4"):
        gpu_parity.settings_of(TINY, "two regions", 1, ["training.per_device_train_batch_size=6"])
    with pytest.raises(InputError, match="multiple of the 2 regions"):
        training.run(settings(study__streams=3))


def _result(loss: float | None, weights: str = "w") -> dict[str, Any]:
    curve = [(10, 9.0), (20, loss), (20, 1.0)]
    return {"curve": curve, "bytes": 2_000_000, "weights": weights, "took_s": 2.0, "params": 10}


def test_the_table_compares_runs_of_a_seed() -> None:
    """Percent of each seed's own data-parallel run; a seed that diverged counts nowhere; other first weights are refused."""
    parallel = {1: _result(2.0), 2: _result(4.0), 3: _result(3.0)}
    two = {1: _result(2.02), 2: _result(4.12), 3: _result(None)}
    rows = {row["arm"]: row for row in gpu_parity.rows_of({ARMS[0]: parallel, "two regions": two})}
    row = rows["two regions"]
    assert row["more_percent"].mean == pytest.approx((1.0 + 3.0) / 2)
    # Student's t of one degree of freedom at 0.975, times the standard error of 1 and 3
    assert row["more_percent"].half == pytest.approx(12.7062047 * 1.0)
    assert (row["diverged"], row["paper_percent"], row["megabytes"]) == (1, "+0.7", 2.0)
    assert rows[ARMS[0]]["more_percent"] is None and rows[ARMS[0]]["loss"].mean == 3.0
    with pytest.raises(InputError, match="first weights"):
        gpu_parity.rows_of({ARMS[0]: parallel, "two regions": {1: _result(2.0, weights="x")}})


def test_a_study_trains_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose tensors may not meet those of the host, a run has the numbers of the host."""

    @torch.no_grad()
    def without_gradients(inner: Inner, batch: Tensor) -> float:  # torch has none for a device that is none
        loss = loss_of(inner.model, batch.to(inner.device))
        for param in inner.model.parameters():
            param.mul_(1 - inner.lr * loss / 9)
        inner.step += 1
        return inner.lr

    monkeypatch.setattr(Inner, "train", without_gradients)
    for changes in ({}, {"study__data_parallel": True}, {"outer__codec": "int8"}):
        far, near = (training.run(settings(**changes), None, each) for each in (FAR, torch.device("cpu")))
        far.pop("seconds"), near.pop("seconds")
        assert far == near
        assert far["curve"][0] != far["curve"][-1]


def test_bf16_computes_in_bfloat16_over_weights_in_fp32() -> None:
    """The loss differs in the digits that bfloat16 has not; the weights stay fp32."""
    curves = [training.run(settings(training__bf16=each))["curve"] for each in (False, True)]
    assert curves[0] != curves[1]
    for (_, loss), (_, rounded) in zip(*curves, strict=True):
        assert rounded == pytest.approx(loss, rel=0.02)
    this = training.Run(settings(training__bf16=True))
    assert {param.dtype for param in this.inner().model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_the_program_goes_on_after_it_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No run without time; killed in the middle, it makes only what is missing; then it makes nothing, and the same table."""
    options = ["--size", "tiny", "--device", "cpu", "--output", str(tmp_path)]

    def done(*more: str) -> str:
        assert gpu_parity.main([*options, *more]) == 0
        return capsys.readouterr().out

    said = done("--minutes", "0")
    assert "stopped before seed 1, data-parallel: 8 runs are still to be made" in said
    lines = tmp_path / "gpu_parity.jsonl"
    assert not (tmp_path / "gpu_parity.md").exists()
    command = [sys.executable, "-m", "tests.studies.gpu_parity", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while lines.stat().st_size == 0 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    before = lines.read_bytes()
    there = before.count(b"\n")
    assert there >= 1
    said = done()
    assert f"{there} of 8 runs are there" in said
    assert lines.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    table = (tmp_path / "gpu_parity.md").read_text()
    assert all(f"| {arm} | 2 |" in table for arm in ARMS) and "A rehearsal" in table
    rows = json.loads((tmp_path / "gpu_parity.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ARMS
    assert "8 of 8 runs are there" in done()
    assert (tmp_path / "gpu_parity.md").read_text() == table
