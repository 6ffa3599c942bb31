import math
from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_cocodc.training import metrics

VOCABULARY = 23


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def samples() -> list[dict[str, torch.Tensor]]:
    """Seven sequences of nine tokens, so that the last batch of two is short; some labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (7, 9), generator=generator)
    labels = torch.where(torch.rand(7, 9, generator=generator) < 0.3, -100, ids)
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(7)]


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM, samples: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Both metrics straight from their definitions, in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.stack([s["input_ids"] for s in samples])).logits[:, :-1].double()
    targets = torch.stack([s["labels"] for s in samples])[:, 1:]
    counted = targets != -100
    return {
        "eval_perplexity": cross_entropy(logits[counted], targets[counted]).exp().item(),
        "eval_accuracy": (logits.argmax(-1)[counted] == targets[counted]).double().mean().item(),
    }


def evaluated(model: Any, samples: Any, folder: Path, names: Any, **options: Any) -> dict[str, float]:
    compute_metrics, preprocess = metrics.causal_lm_metrics(names)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        eval_dataset=samples,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess,
    )
    return trainer.evaluate()


@pytest.mark.parametrize(
    "options", [{}, {"batch_eval_metrics": True}, {"eval_accumulation_steps": 1}], ids=str
)
def test_trainer_reports_definitions(
    options: dict[str, Any], model: Any, samples: Any, expected: dict[str, float], tmp_path: Path
) -> None:
    """eval_perplexity and eval_accuracy are exp(cross entropy) and accuracy per token of all batches."""
    result = evaluated(model, samples, tmp_path, ["perplexity", "accuracy"], **options)
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, rel=1e-5)
    # Not the mean of the batches' means, which eval_loss is: batches differ in their number of labels.
    assert result["eval_perplexity"] != pytest.approx(math.exp(result["eval_loss"]), rel=1e-5)


def test_trainer_twice(model: Any, samples: Any, expected: dict[str, float], tmp_path: Path) -> None:
    """A second evaluation by the same functions forgets the first."""
    compute_metrics, preprocess = metrics.causal_lm_metrics(["perplexity"])
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(
        model=model, args=arguments, compute_metrics=compute_metrics, preprocess_logits_for_metrics=preprocess
    )
    part = trainer.evaluate(samples[:2])["eval_perplexity"]
    assert trainer.evaluate(samples)["eval_perplexity"] == pytest.approx(
        expected["eval_perplexity"], rel=1e-5
    )
    assert trainer.evaluate(samples[:2])["eval_perplexity"] == part


def test_only_the_named(model: Any, samples: Any, tmp_path: Path) -> None:
    """Only named metrics are computed, and none means no functions."""
    result = evaluated(model, samples, tmp_path, ["accuracy"])
    assert "eval_accuracy" in result
    assert "eval_perplexity" not in result
    assert metrics.causal_lm_metrics([]) == (None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_reduced(dtype: torch.dtype) -> None:
    """Two small values per label are kept, exact to fp32 for the given logits, with 0 for ignored labels."""
    generator = torch.Generator().manual_seed(2)
    logits = (10 * torch.randn(3, 6, VOCABULARY, generator=generator)).to(dtype)
    labels = torch.randint(VOCABULARY, (3, 6), generator=generator)
    labels[1, 2:] = -100
    kept = logits.clone()
    log_probs, right = metrics.next_token_scores((logits, "past_key_values"), labels)
    assert log_probs.shape == right.shape == (3, 5)
    assert (log_probs.dtype, right.dtype) == (torch.float32, torch.int8)
    assert torch.equal(logits, kept)
    wanted = logits.double().log_softmax(-1)
    for b in range(3):
        for t in range(5):
            label = int(labels[b, t + 1])
            assert float(log_probs[b, t]) == pytest.approx(
                0.0 if label < 0 else float(wanted[b, t, label]), abs=1e-4
            )
            assert int(right[b, t]) == (int(wanted[b, t].argmax()) == label)


def test_the_metric_alone() -> None:
    """It works as any metric of evaluate does, with rows of any length: guessing among four gives 4."""
    metric = metrics.NextToken()
    assert isinstance(metric, evaluate.Metric)
    metric.add_batch(log_probs=[[math.log(0.25)] * 3], right=[[1, 0, 1]], references=[[1, 2, 3]])
    metric.add_batch(log_probs=[[math.log(0.25), 0.0]], right=[[1, 1]], references=[[1, -100]])
    assert metric.compute() == {"perplexity": pytest.approx(4.0), "accuracy": 0.75}


def test_extreme_values() -> None:
    """A hopeless model has perplexity inf and no labels at all give nan, neither an exception."""
    found = metrics.NextToken().compute(log_probs=[[-1e6]], right=[[0]], references=[[1]])
    assert found == {"perplexity": math.inf, "accuracy": 0.0}
    found = metrics.NextToken().compute(log_probs=[[0.0]], right=[[1]], references=[[-100]])
    assert all(math.isnan(each) for each in found.values())


def test_nothing_on_disk(tmp_path: Path) -> None:
    """A metric leaves nothing in its cache folder."""
    metric = metrics.NextToken(cache_dir=str(tmp_path))
    metric.compute(log_probs=[[0.0]], right=[[1]], references=[[1]])
    assert list(tmp_path.iterdir()) == []
