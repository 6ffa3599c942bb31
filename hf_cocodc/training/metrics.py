"""Perplexity and next-token accuracy as evaluate metrics that need no Hub, and the functions that Trainer calls."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

IGNORED = -100  # the label that Hugging Face losses ignore


class _LabelMean(evaluate.Metric):
    """Mean of one value per label, over all labels that are not -100. Writes nothing to disk."""

    value_type: str

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(keep_in_memory=True, **kwargs)

    def _build_data_dir(self) -> str:
        # The inherited method makes an empty folder under ~/.cache for files that are never written.
        return str(self._data_dir_root)

    def _info(self) -> evaluate.MetricInfo:
        # One row per sequence instead of one per label: evaluate's cost is per row.
        types = {"predictions": self.value_type, "references": "int64"}
        features = datasets.Features({name: datasets.List(datasets.Value(t)) for name, t in types.items()})
        about = {
            "description": str(self.__doc__),
            "citation": "",
            "inputs_description": "one list per sequence",
        }
        return evaluate.MetricInfo(features=features, **about)

    @staticmethod
    def _mean(predictions: Sequence[Any], references: Sequence[Any]) -> float:
        """Mean over the counted labels of all sequences together; nan if there are none."""
        rows = zip(predictions, references, strict=True)
        counted = [np.asarray(row, np.float64)[np.asarray(labels) != IGNORED] for row, labels in rows]
        values = np.concatenate([np.empty(0), *counted])
        return float(values.mean()) if values.size else math.nan


class Perplexity(_LabelMean):
    """exp(-mean log p(label)) per token: 1 is perfect; guessing among V tokens gives V.

    `compute(predictions=natural log-probabilities of the labels, references=labels)`, one list per sequence.
    """

    value_type = "float32"

    def _compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        loss = -self._mean(predictions, references)
        return {"perplexity": math.inf if loss > 700 else math.exp(loss)}


class TokenAccuracy(_LabelMean):
    """Share of the labels that the model ranked first: 1 is perfect.

    `compute(predictions=1 for right or 0 for wrong, references=labels)`, one list per sequence.
    """

    value_type = "int8"

    def _compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        return {"accuracy": self._mean(predictions, references)}


METRICS: dict[str, type[_LabelMean]] = {"perplexity": Perplexity, "accuracy": TokenAccuracy}


def causal_lm_metrics(names: Sequence[str]) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Trainer's `compute_metrics` and `preprocess_logits_for_metrics` for next-token prediction.

    "perplexity" and "accuracy" become eval_perplexity and eval_accuracy; () gives (None, None).
    """
    metrics = {name: METRICS[name]() for name in names}

    def compute_metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        # With batch_eval_metrics, Trainer calls this once per batch, with tensors; otherwise once, with arrays.
        given = (*prediction.predictions, prediction.label_ids)
        log_probs, right, labels = (x.cpu().numpy() if hasattr(x, "cpu") else x for x in given)
        for name, metric in metrics.items():
            predictions = list(log_probs if name == "perplexity" else right)
            metric.add_batch(predictions=predictions, references=list(labels[:, 1:]))
        results = [metric.compute() for metric in metrics.values()] if compute_result else []
        return dict(item for result in results for item in result.items())

    return (compute_metrics, next_token_scores) if metrics else (None, None)


def next_token_scores(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Log-probability of each label (fp32), and 1 or 0 for right or wrong (int8): each (batch, tokens - 1).

    Args:
        logits: (batch, tokens, vocabulary), or a tuple that starts with the logits. They stay on their device.
        labels: (batch, tokens); the logits at t - 1 predict the label at t.
    """
    from torch.nn.functional import cross_entropy

    logits, targets = (logits[0] if isinstance(logits, tuple) else logits)[:, :-1], labels[:, 1:]
    right = (logits.argmax(-1) == targets).char()
    log_probs = right.float()
    # One sequence at a time: an fp32 copy of a whole batch of logits can be larger than the model.
    for row, scores in enumerate(logits):
        log_probs[row] = -cross_entropy(scores.float(), targets[row], ignore_index=IGNORED, reduction="none")
    return log_probs, right
