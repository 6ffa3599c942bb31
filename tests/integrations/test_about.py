"""What a Trainer's regions compare before they train."""

from __future__ import annotations

from pathlib import Path

from transformers import Trainer, TrainingArguments

from hf_cocodc.integrations.about import of_trainer
from tests.processes.worker import Tokens
from tests.toys import llama


def test_a_trainer_shows_its_model_its_training_and_its_data(tmp_path: Path) -> None:
    """The name of the run is that of the output folder; the batch is what a region's inner step takes."""
    args = TrainingArguments(
        output_dir=str(tmp_path / "mine" / "region-1"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        learning_rate=2e-3,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model=llama(), args=args, train_dataset=Tokens(16))
    about = of_trainer(trainer, trainer.model, {"data.path": "there"})
    assert about.run == "mine"
    assert about.model["model.config.hidden_size"] == trainer.model.config.hidden_size
    assert (about.facts["batch"], about.facts["training.learning_rate"]) == (12, 2e-3)
    assert about.facts["data.path"] == "there"
    assert about.first_samples
    trainer.train_dataset = Tokens(16, seed=1)
    assert of_trainer(trainer, trainer.model, {}).first_samples not in ("", about.first_samples)
