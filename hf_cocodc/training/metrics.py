"""Perplexity and next-token accuracy as a metric of evaluate that needs no Hub, and the functions that Trainer calls."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

IGNORED = -100  # the label that Hugging Face losses ignore


class NextToken(evaluate.Metric):
    """How well labels were predicted, over all that are not -100: `perplexity`, exp(-mean log p(label)), which guessing among V
    tokens makes V; and `accuracy`, the share of labels that were ranked first. Writes nothing to disk.

    `compute(log_probs=natural log-probabilities of the labels, right=1 or 0, references=labels)`, one list per sequence.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(keep_in_memory=True, **kwargs)

    def _build_data_dir(self) -> str:
        # The inherited method makes an empty folder under ~/.cache for files that are never written.
        return str(self._data_dir_root)

    def _info(self) -> evaluate.MetricInfo:
        # One row per sequence instead of one per label: evaluate's cost is per row.
        types = {"log_probs": "float32", "right": "int8", "references": "int64"}
        features = datasets.Features({name: datasets.List(datasets.Value(t)) for name, t in types.items()})
        return evaluate.MetricInfo(
            str(self.__doc__), "", features, inputs_description="one list per sequence"
        )

    def _compute(
        self, log_probs: Sequence[Any], right: Sequence[Any], references: Sequence[Any]
    ) -> dict[str, float]:
        counted = [np.asarray(labels) != IGNORED for labels in references]

        def mean(rows: Sequence[Any]) -> float:
            values = [np.asarray(row, np.float64)[each] for row, each in zip(rows, counted, strict=True)]
            every = np.concatenate([np.empty(0), *values])
            return float(every.mean()) if every.size else math.nan

        loss = -mean(log_probs)
        return {"perplexity": math.inf if loss > 700 else math.exp(loss), "accuracy": mean(right)}


def causal_lm_metrics(names: Sequence[str]) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Trainer's `compute_metrics` and `preprocess_logits_for_metrics` for next-token prediction.

    "perplexity" and "accuracy" become eval_perplexity and eval_accuracy; () gives (None, None).
    """
    metric = NextToken()

    def compute_metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        # With batch_eval_metrics, Trainer calls this once per batch, with tensors; otherwise once, with arrays.
        given = (*prediction.predictions, prediction.label_ids)
        log_probs, right, labels = (x.cpu().numpy() if hasattr(x, "cpu") else x for x in given)
        metric.add_batch(log_probs=list(log_probs), right=list(right), references=list(labels[:, 1:]))
        result = (metric.compute() if compute_result else None) or {}
        return {name: result[name] for name in names if result}

    return (compute_metrics, next_token_scores) if names else (None, None)


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
