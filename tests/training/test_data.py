import hashlib
import itertools
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from transformers import AutoTokenizer, default_data_collator

from hf_cocodc.errors import InputError
from hf_cocodc.run import shards
from hf_cocodc.settings import RegionConfig
from hf_cocodc.training import data
from tests.run.test_churn import LABELS, check_mix

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_COCODC_REGION", "HF_COCODC_REGIONS"):
        monkeypatch.delenv(name, raising=False)


class Numbers(IterableDataset[int]):
    """0 .. count - 1, split over DataLoader workers by this dataset itself, as torch's documentation asks."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(100 * self.epoch + first, 100 * self.epoch + self.count, step))


class Reshuffled(Numbers):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def stream(count: int, num_files: int) -> datasets.IterableDataset:
    return datasets.Dataset.from_dict({"n": list(range(count))}).to_iterable_dataset(num_shards=num_files)


SHARDABLE: dict[str, Callable[[], Any]] = {
    "datasets.Dataset": lambda: datasets.Dataset.from_dict({"n": list(range(11))}),
    "datasets.IterableDataset, files divide": lambda: stream(11, 3),
    "datasets.IterableDataset, files do not divide": lambda: stream(11, 2),
    "torch map-style": lambda: TensorDataset(torch.arange(11)),
    "sequence": lambda: list(range(11)),
    "torch IterableDataset": lambda: Numbers(11),
}


def run_python(script: str, **variables: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def number(sample: Any) -> int:
    return int(
        sample["n"] if isinstance(sample, dict) else sample[0] if isinstance(sample, tuple) else sample
    )


@pytest.mark.parametrize("kind", SHARDABLE)
def test_regions_partition(kind: str) -> None:
    """Each sample is in exactly one of three regions, which have a third each, equal in a second pass."""
    pieces = [shards.region_shard(SHARDABLE[kind](), region, 3) for region in range(3)]
    parts = [[number(sample) for sample in shard] for shard in pieces]
    assert sorted(itertools.chain(*parts)) == list(range(11))
    assert sorted(map(len, parts)) == [3, 4, 4]
    assert [[number(sample) for sample in shard] for shard in pieces] == parts


SORTED: dict[str, Callable[[], Any]] = {
    "datasets.Dataset": lambda: datasets.Dataset.from_dict({"n": LABELS}),
    "datasets.IterableDataset, many files": lambda: labels_in_files(64),
    "datasets.IterableDataset, few files": lambda: labels_in_files(2),
    "torch map-style": lambda: TensorDataset(torch.tensor(LABELS)),
}


def labels_in_files(num_files: int) -> datasets.IterableDataset:
    return datasets.Dataset.from_dict({"n": LABELS}).to_iterable_dataset(num_shards=num_files)


@pytest.mark.parametrize("kind", SORTED)
def test_an_ordered_dataset_gives_regions_the_same_mix(kind: str) -> None:
    """Rows that are sorted by source: each of three parts has the same share of each."""
    parts = [Counter(map(number, shards.region_shard(SORTED[kind](), r, 3))) for r in range(3)]
    shares = {label: count / len(LABELS) for label, count in Counter(LABELS).items()}
    check_mix(parts, shares)


@pytest.mark.parametrize("kind", SHARDABLE)
def test_one_region_changes_nothing(kind: str) -> None:
    """With one region, the default, the dataset itself comes back."""
    dataset = SHARDABLE[kind]()
    assert shards.region_shard(dataset) is dataset
    assert shards.region_shard(dataset, 0, 1) is dataset
    assert shards.region_shard(dataset, num_regions=1) is dataset
    assert shards.region_shard(dataset, RegionConfig(count=1)) is dataset


def test_one_region_needs_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """To train alone, the warning about it says to set nothing but the number of regions."""
    monkeypatch.setenv("HF_COCODC_REGIONS", "1")
    assert list(shards.region_shard(range(7))) == list(range(7))


def test_regions_partition_in_workers() -> None:
    """With two DataLoader workers a region, every sample is still read in exactly one region, once."""
    read: list[int] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        for region in range(2):
            shard = shards.region_shard(Numbers(11), region, 2)
            read += list(DataLoader(shard, batch_size=None, num_workers=2))
    assert sorted(read) == list(range(11))


def test_iterable_shard_pickles() -> None:
    """A pickled shard, which is what a spawned DataLoader worker gets, reads the same samples."""
    shard = pickle.loads(pickle.dumps(shards.region_shard(Reshuffled(11), 1, 3)))
    assert list(shard) == [1, 4, 7, 10]
    shard.set_epoch(1)
    assert list(shard) == [101, 104, 107, 110]


def test_iterable_shard_under_accelerate() -> None:
    """Accelerate prepares a shard like any iterable dataset, and its ranks split the samples further."""
    region = shards.region_shard(Numbers(12), 1, 2)
    prepared = Accelerator(cpu=True).prepare(DataLoader(region, batch_size=2))
    assert [int(n) for batch in prepared for n in batch] == [1, 3, 5, 7, 9, 11]
    ranks = [IterableDatasetShard(region, num_processes=2, process_index=rank) for rank in range(2)]
    assert [list(rank) for rank in ranks] == [[1, 5, 9], [3, 7, 11]]


def test_iterable_shard_reshuffles() -> None:
    """A shard passes set_epoch on, or lets the epoch choose the stream's own generator."""
    shard = shards.region_shard(Reshuffled(6), 1, 2)
    shard.set_epoch(2)
    assert list(shard) == [201, 203, 205]
    assert not hasattr(shard, "__len__")
    passes = []
    for region in range(2):
        shard = shards.region_shard(OwnGenerator(12), region, 2)
        for epoch in (0, 3):
            shard.set_epoch(epoch)
            passes.append(list(shard))
    assert sorted(passes[0] + passes[2]) == sorted(passes[1] + passes[3]) == list(range(12))
    assert passes[0] != passes[1]


class Drawn(Numbers):
    """A stream that draws its order from the global generators, when it begins and while it is read."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        own = range(*(worker.id if worker else 0, self.count, worker.num_workers if worker else 1))
        order = [own[place] for place in torch.randperm(len(own))]
        while order:
            yield order.pop((random.randrange(1 << 20) + int(np.random.randint(1 << 20))) % len(order))


class OwnGenerator(Numbers):
    def __init__(self, count: int, generator: torch.Generator | None = None) -> None:
        super().__init__(count)
        self.generator = generator or torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count, generator=self.generator).tolist())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_draws_from_global_generators_is_partitioned(num_workers: int) -> None:
    """Regions train with random numbers of their own: a stream draws apart from them, another order in each pass."""
    passes: list[list[int]] = []
    for region in range(2):
        shard = shards.region_shard(Drawn(40), region, 2)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + region)
        before = torch.get_rng_state(), random.getstate()
        for epoch in range(2):
            shard.set_epoch(epoch)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
                passes.append([int(n) for n in DataLoader(shard, batch_size=None, num_workers=num_workers)])
        if not num_workers:
            assert random.getstate() == before[1]
            list(shard)
            torch.set_rng_state(before[0])
            list(shard)
            assert torch.equal(torch.get_rng_state(), before[0])
    assert sorted(passes[0] + passes[2]) == sorted(passes[1] + passes[3]) == list(range(40))
    assert passes[0] != passes[1]


def test_a_look_at_a_sample_changes_no_order() -> None:
    """A script may print one in region 0 alone, from a stream with a generator of its own."""
    read = []
    for region in range(2):
        shard = shards.region_shard(OwnGenerator(40, generator_of(7)), region, 2)
        if not region:
            next(iter(shard))
        shard.set_epoch(0)
        read += list(shard)
    assert sorted(read) == list(range(40))


@pytest.mark.parametrize("num_files", [33, 6, 5, 1])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_partitioned_alike_in_every_epoch(num_files: int, num_workers: int) -> None:
    """datasets shuffles its files and its buffer in each epoch; no region reads a sample that another has read in any epoch."""
    parts: list[set[int]] = []
    for region in range(2):
        shard = shards.region_shard(stream(60, num_files).shuffle(seed=1, buffer_size=7), region, 2)
        read = []
        for epoch in range(3):
            shard.set_epoch(epoch)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
                loader = DataLoader(
                    shard, batch_size=None, num_workers=num_workers - region if num_workers else 0
                )
                read.append([int(row["n"]) for row in loader])
        assert sorted(read[0]) == sorted(read[1]) == sorted(read[2])
        parts.append(set(read[0]))
    assert sorted([*parts[0], *parts[1]]) == list(range(60))
    assert {row["n"] for row in pickle.loads(pickle.dumps(shard))} == parts[1]


@pytest.mark.parametrize("num_files", [4, 1])
def test_what_a_held_out_set_has_is_nobodys(num_files: int) -> None:
    """`skip` counts the samples of the whole stream, and not those of a region's files."""
    whole = stream(40, num_files)
    read = [[row["n"] for row in shards.region_shard(whole.skip(10).take(25), r, 2)] for r in (0, 1)]
    assert sorted(read[0] + read[1]) == list(range(10, 35))


def test_the_part_of_a_stream_can_be_mapped_and_resumed() -> None:
    """The stride of files that cannot be dealt evenly is a stream of datasets like any other."""
    shard = shards.region_shard(stream(20, 3), 1, 2).map(lambda row: {"twice": 2 * row["n"]})
    rows = iter(shard)
    assert [next(rows)["twice"] for _ in range(3)] == [2, 6, 10]
    resumed = shards.region_shard(stream(20, 3), 1, 2).map(lambda row: {"twice": 2 * row["n"]})
    resumed.load_state_dict(shard.state_dict())
    assert next(iter(resumed))["twice"] == 14


def divided(*datasets: Any) -> dict[str, Any]:
    """What one region says it has divided for its next run."""
    shards.facts_of_shards()
    for dataset in datasets:
        shards.region_shard(dataset, 0, 2)
    return shards.facts_of_shards()


ROWS = datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(50)]})


def test_what_regions_divide_is_compared() -> None:
    """Equal samples in equal order have equal facts; an order that nobody has given a seed has others."""
    assert divided(ROWS) == divided(ROWS) != divided(ROWS.select(range(49)))
    assert shards.facts_of_shards() == divided(ROWS.select(range(49)))
    assert divided(ROWS, range(9)) == divided(range(9), ROWS) != divided(ROWS)
    assert divided(ROWS.shuffle(seed=1)) == divided(ROWS.shuffle(seed=1)) != divided(ROWS.shuffle(seed=2))
    seedless: list[Callable[[], Any]] = [
        lambda: ROWS.shuffle(),
        lambda: ROWS.train_test_split(test_size=0.5)["train"],
        lambda: torch.utils.data.random_split(range(50), [25, 25])[0],
        lambda: OwnGenerator(9, generator_of(int(torch.randint(1 << 30, ())))),
    ]
    for make in seedless:
        facts = []
        for region in range(2):
            np.random.seed(region)
            torch.manual_seed(region)
            facts.append(divided(make()))
        assert facts[0] != facts[1]


class SometimesAugmented(torch.utils.data.Dataset[int]):
    """With a generator of its own that nobody has given a seed; it leaves the first sample as it is."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index + (index % 2) * int(self._generator.integers(1 << 40))


def test_samples_that_are_augmented_now_and_then_are_not_compared() -> None:
    """Equal data would be refused."""
    assert divided(SometimesAugmented()) == {"data.order": ["50 samples"]}


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_stream_that_is_shuffled_without_a_seed_is_refused() -> None:
    """Every region would divide an order of its own."""
    with pytest.raises(InputError, match=r"shuffled without a seed.*shuffle\(seed=42\)"):
        shards.region_shard(stream(20, 2).shuffle().map(lambda row: row), 0, 2)
    assert (
        divided(stream(20, 2).shuffle(seed=1))
        == divided(stream(20, 2).shuffle(seed=1))
        != divided(stream(20, 2))
    )


def test_samples_that_differ_when_read_have_only_a_number() -> None:
    """Augmentation from the global generators is read alike; from a generator of the dataset's own it cannot be compared."""

    class Augmented:
        def __init__(self, own: bool) -> None:
            self.random = np.random.default_rng() if own else np.random

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return index + self.random.normal()

    assert divided(Augmented(own=True)) == divided(Augmented(own=True)) == {"data.order": ["4 samples"]}
    assert divided(Augmented(own=False)) == divided(Augmented(own=False)) != divided(Augmented(own=True))


def test_region_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_COCODC_REGION and HF_COCODC_REGIONS choose the shard; an argument goes before them."""
    monkeypatch.setenv("HF_COCODC_REGION", "1")
    monkeypatch.setenv("HF_COCODC_REGIONS", "3")
    assert list(shards.region_shard(range(7))) == [1, 4]
    assert list(shards.region_shard(range(7), region=0)) == [0, 3, 6]
    assert list(shards.region_shard(range(7), num_regions=2)) == [1, 3, 5]


def test_region_from_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """A RegionConfig, as a script's flags make it, chooses the shard; the environment fills what it leaves out."""
    assert list(shards.region_shard(range(7), RegionConfig(region=1, count=3))) == [1, 4]
    with pytest.raises(InputError, match="num_regions=3 beside a RegionConfig"):
        shards.region_shard(range(7), RegionConfig(region=1, count=3), 3)
    with pytest.raises(InputError, match="a coordinator .* is given, but not how many regions there are"):
        shards.region_shard(range(7), RegionConfig(coordinator="10.0.0.1:29650"))
    monkeypatch.setenv("HF_COCODC_REGION", "1")
    monkeypatch.setenv("HF_COCODC_REGIONS", "3")
    assert list(shards.region_shard(range(7), RegionConfig())) == [1, 4]
    assert list(shards.region_shard(range(7), RegionConfig(on_loss="continue", max=5))) == [1, 6]
    monkeypatch.setenv("HF_COCODC_REGION", "east")
    with pytest.raises(InputError, match="HF_COCODC_REGION='east' must be a whole number"):
        shards.region_shard(range(7))
    with pytest.raises(InputError, match="HF_COCODC_REGION='east' must be a whole number"):
        shards.region_shard(range(7), num_regions=2)
    monkeypatch.setenv("HF_COCODC_REGION", "1")
    with pytest.raises(InputError, match="regions.count=2 but the environment says HF_COCODC_REGIONS='3'"):
        shards.region_shard(range(7), RegionConfig(region=1, count=2))


def test_regions_that_may_join_have_a_part_each() -> None:
    """With regions.max=4 the data has four parts, whatever number of regions the run begins with; together they are all of it."""
    parts = [
        list(shards.region_shard(range(10), RegionConfig(region=region, count=2, min=1, max=4)))
        for region in range(4)
    ]
    assert parts == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    with pytest.raises(
        InputError, match=r"region 4 of 2: regions that join are numbered 0 \.\. 3.*regions\.max"
    ):
        shards.region_shard(range(10), RegionConfig(region=4, count=2, min=1, max=4))


@pytest.mark.parametrize(("region", "num_regions"), [(2, 2), (-1, 2), (0, 0), (0, None), (None, 2)])
def test_region_that_is_none(region: int | None, num_regions: int | None) -> None:
    """A region that does not exist is refused with its number, the rule and both ways to set it."""
    with pytest.raises(
        InputError, match=r"region=.* of num_regions=.*HF_COCODC_REGION and HF_COCODC_REGIONS"
    ):
        shards.region_shard(range(7), region, num_regions)


def test_not_shardable() -> None:
    """Fewer samples than regions, several splits, and things that are no dataset are refused."""
    with pytest.raises(InputError, match=r"2 samples for 3 regions: each region needs at least one. Use"):
        shards.region_shard([1, 2], 0, 3)
    with pytest.raises(InputError, match=r"2 samples for 3 regions"):
        shards.region_shard(datasets.Dataset.from_dict({"n": [1, 2]}), 0, 3)
    with pytest.raises(InputError, match=r"DatasetDict is not a dataset. Pass one split"):
        shards.region_shard(datasets.DatasetDict(train=datasets.Dataset.from_dict({"n": [1, 2]})), 0, 2)
    with pytest.raises(InputError, match=r"generator is not a dataset"):
        shards.region_shard((n for n in range(9)), 0, 2)


@pytest.fixture(scope="module")
def stdlib() -> dict[str, datasets.Dataset]:
    return {split: data.python_stdlib(split) for split in ("train", "test")}


def test_stdlib_is_the_library(stdlib: dict[str, datasets.Dataset]) -> None:
    """Train and test hold known modules, each once, and no third-party code; 2 to 10 % are held out."""
    train, test = (set(stdlib[split]["text"]) for split in ("train", "test"))
    assert len(train) == len(stdlib["train"])
    assert not train & test
    for module in (os, subprocess, warnings):
        assert Path(str(module.__file__)).read_bytes().decode() in train | test
    assert Path(pytest.__file__).read_bytes().decode() not in train | test
    assert 0.02 < len(test) / (len(train) + len(test)) < 0.1
    assert sum(map(len, train)) > 3_000_000


def test_stdlib_is_deterministic(stdlib: dict[str, datasets.Dataset]) -> None:
    """Another process, with another hash seed, reads the same documents in the same order."""
    digest = "hashlib.sha256('|'.join(d.python_stdlib('test')['text']).encode()).hexdigest()"
    script = f"import hashlib, hf_cocodc.training.data as d; assert {digest} == '{{}}'"
    texts = "|".join(stdlib["test"]["text"])
    run_python(script.format(hashlib.sha256(texts.encode()).hexdigest()), PYTHONHASHSEED="7")


def test_stdlib_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests, packages, caches, copies, empty files and other encodings stay out; paths order the rest."""
    files = {
        "b.py": b"b = 1\r\n",
        "a/z.py": b"z = '\xc3\xa9'\n",
        "a/copy.py": b"b = 1\r\n",
        "empty.py": b"",
        "latin1.py": b"e = '\xe9'\n",
        "notes.txt": b"text",
        **{f"{name}/x{i}.py": b"x = %d\n" % i for i, name in enumerate(sorted(data.LEFT_OUT))},
        "a/test/deep.py": b"deep = 1\n",
        "test.py": b"file = 'not a folder'\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    # By path a/copy.py comes first, so b.py is the copy; no path of the three hashes into the held-out part.
    assert data.python_stdlib("train")["text"] == ["b = 1\r\n", "z = '\xe9'\n", "file = 'not a folder'\n"]
    with pytest.raises(InputError, match=r"No Python sources in .* Set data.path"):
        data.python_stdlib("test")
    with pytest.raises(InputError, match=r"data.split='validation'.*'train' or 'test'"):
        data.python_stdlib("validation")


FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3fd"
TRICKY = [
    "",
    "\n",
    " lead",
    "tab\tcrlf\r\n\r",
    "\u202e",
    FAMILY,
    "don't , stop .",
    "".join(map(chr, range(0x250))),
]


@pytest.mark.parametrize("reloaded", [False, True])
def test_byte_tokenizer_round_trip(reloaded: bool, tmp_path: Path) -> None:
    """Token ids are the UTF-8 bytes and decode to the same text, also when saved and loaded."""
    tokenizer: Any = data.byte_tokenizer()
    if reloaded:
        tokenizer.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 257
    assert {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id} == {256}
    assert tokenizer.model_max_length > 10**20
    assert tokenizer.clean_up_tokenization_spaces is False
    for text in TRICKY:
        assert tokenizer(text).input_ids == list(text.encode())
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    marked = "a<|endoftext|>b"
    assert tokenizer(marked).input_ids == [97, 256, 98]
    assert tokenizer.decode([97, 256, 98]) == marked
    assert tokenizer.decode([97, 256, 98], skip_special_tokens=True) == "ab"


def documents(texts: list[str], streaming: bool = False) -> Any:
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    if streaming:
        return datasets.IterableDataset.from_generator(lambda: iter(rows))
    return datasets.Dataset.from_dict({key: [row[key] for row in rows] for key in ("id", "text")})


@pytest.mark.parametrize("streaming", [False, True])
def test_pack_is_concatenation(streaming: bool) -> None:
    """Blocks joined are the documents' bytes, eos after each, up to the last full block; labels are equal."""
    texts = [f"document {i} " * (i % 7) for i in range(50)]
    expected = [token for text in texts for token in (*text.encode(), 256)]
    blocks = list(data.pack(documents(texts, streaming), data.byte_tokenizer(), 16))
    joined = [int(token) for block in blocks for token in block["input_ids"]]
    assert joined == expected[: len(expected) // 16 * 16]
    for block in blocks:
        assert list(block) == ["input_ids", "labels"]
        assert list(block["labels"]) == list(block["input_ids"])
    batch = default_data_collator(blocks[:3])
    assert batch["labels"].shape == batch["input_ids"].shape == (3, 16)
    assert batch["labels"].dtype == torch.int64


def test_pack_adds_eos_only() -> None:
    """A tokenizer that starts every text with a bos token does not get to do so between packed documents."""
    tokenizer = data.byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    assert tokenizer("ab").input_ids == [256, 97, 98]
    blocks = data.pack(documents(["ab", "c"]), tokenizer, 5)
    assert [block["input_ids"] for block in blocks] == [[97, 98, 256, 99, 256]]


def test_pack_drops_tails_per_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of documents packed together drops its own tail."""
    monkeypatch.setattr(data, "PACKED_TOGETHER", 3)
    blocks = data.pack(documents(["abc", "de", "f", "ghi", "jk", "l"]), data.byte_tokenizer(), 4)
    assert [data.byte_tokenizer().decode(block["input_ids"]) for block in blocks] == [
        "abc<|endoftext|>",
        "de<|endoftext|>f",
        "ghi<|endoftext|>",
        "jk<|endoftext|>l",
    ]


def test_pack_is_quiet_and_leaves_no_cache(capfd: pytest.CaptureFixture[str]) -> None:
    """Packing in memory makes neither a cache file nor a progress bar, and leaves bars as they were."""
    assert not datasets.are_progress_bars_disabled()
    blocks = data.pack(documents(["some text"] * 100), data.byte_tokenizer(), 8)
    assert blocks.cache_files == []
    assert blocks.features["labels"] == datasets.List(datasets.Value("int32"))
    assert "".join(capfd.readouterr()) == ""
    assert not datasets.are_progress_bars_disabled()


def test_pack_finds_what_another_rank_has_packed(tmp_path: Path) -> None:
    """The part of a region has one name in the cache, whoever packs it: ranks, and processes that pack together."""
    (tmp_path / "text.json").write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(300)))

    def packed(num_proc: int = 1) -> Any:
        files, cache = str(tmp_path / "text.json"), str(tmp_path / "cache")
        text = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache).shuffle(seed=1)
        part = shards.region_shard(text, 1, 2)
        return data.pack(part, data.byte_tokenizer(), 16, num_proc=num_proc)

    blocks = packed()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.arrow")}
    assert packed()[:] == blocks[:]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.arrow")} == before
    assert len(packed(num_proc=2)) in range(len(blocks) - 1, len(blocks) + 1)  # each has a tail of its own


@pytest.mark.parametrize("streaming", [False, True])
def test_pack_refuses(streaming: bool) -> None:
    """Too little or no text, no such column, no eos token and too small a block are refused with reasons."""
    tokenizer = data.byte_tokenizer()
    with pytest.raises(InputError, match=r"2 documents with 9 tokens.* block_size=10. Use more text"):
        data.pack(documents(["abc", "defg"], streaming), tokenizer, 10)
    assert len(list(data.pack(documents(["abc", "defg"], streaming), tokenizer, 9))) == 1
    with pytest.raises(InputError, match=r"^0 documents"):
        data.pack(documents([], streaming), tokenizer, 10)
    with pytest.raises(InputError, match=r"data.text_column='content' .* one of id, text"):
        data.pack(documents(["abc"], streaming), tokenizer, 2, text_column="content")
    with pytest.raises(InputError, match=r"block_size=1 must be at least 2"):
        data.pack(documents(["abc"], streaming), tokenizer, 1)
    tokenizer.eos_token = None
    with pytest.raises(InputError, match=r"no eos token"):
        data.pack(documents(["abc"], streaming), tokenizer, 2)


@pytest.mark.parametrize("streaming", [False, True])
def test_load_text_builtin(streaming: bool, stdlib: dict[str, datasets.Dataset]) -> None:
    """data.builtin: python-stdlib loads the embedded corpus, streaming or not."""
    loaded = data.load_text("python-stdlib", None, None, "test", "text", streaming)
    assert isinstance(loaded, datasets.IterableDataset if streaming else datasets.Dataset)
    assert [row["text"] for row in loaded] == list(stdlib["test"]["text"])


@pytest.mark.parametrize("streaming", [False, True])
def test_load_text_folder(streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data.path loads a folder of data files through datasets, and a missing column lists those there."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "train.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    path = str(tmp_path / "corpus")
    loaded = data.load_text(None, path, None, "train", "body", streaming)
    assert [row["body"] for row in loaded] == ["one", "two"]
    with pytest.raises(InputError, match=r"data.text_column='text' .* one of body"):
        data.load_text(None, path, None, "train", "text", streaming)
    with pytest.raises(InputError, match=r"data.split='validation': "):
        data.load_text(None, path, None, "validation", "body", streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("train.jsonl", b"", "there is no row"),
        ("train.jsonl", b"{bad", "JSON parse error"),
        ("train.csv", b"", "No columns to parse"),
        ("train.csv", b"text\n\xff\xa0", "can't decode byte"),
    ],
)
def test_files_that_hold_no_rows_are_refused(
    name: str, content: bytes, why: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its library makes of it, and whether it reads the files at once or only as a stream."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    with pytest.raises(
        InputError, match=rf"data.split='train': .*{why}.*Name a dataset on the Hub or a folder"
    ):
        data.load_text(None, str(tmp_path / "corpus"), None, "train", "text", streaming)


def test_load_text_refuses(tmp_path: Path) -> None:
    """A path is refused where nothing is."""
    with pytest.raises(InputError, match=r"data.path='.*nowhere'.*Name a dataset on the Hub or a folder"):
        data.load_text(None, str(tmp_path / "nowhere"), None, "train", "text", False)


def test_import_is_light() -> None:
    """Importing hf_cocodc.training.data loads none of torch, datasets, transformers and accelerate."""
    heavy = {"torch", "datasets", "transformers", "accelerate"}
    run_python(f"import sys, hf_cocodc.training.data; assert not {heavy} & {{*sys.modules}}")
