"""What a Trainer's regions compare before they train."""

from __future__ import annotations

from pathlib import Path

from transformers import Trainer, TrainingArguments

from hf_cocodc.trainer.callback import of_trainer
from hf_cocodc.training.data import byte_tokenizer
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
    args._n_gpu = 2  # a plain process: Trainer trains with DataParallel
    assert of_trainer(trainer, trainer.model, {}).facts["batch"] == 24
    assert about.first_samples
    trainer.train_dataset = Tokens(16, seed=1)
    assert of_trainer(trainer, trainer.model, {}).first_samples not in ("", about.first_samples)


def test_the_ids_of_special_tokens_are_the_tokenizers() -> None:
    """Trainer writes them into the config when it trains. Regions with tokenizers of two kinds are still told apart."""
    tokenizer = byte_tokenizer()
    trainer = Trainer(model=llama(), args=TrainingArguments(report_to="none", use_cpu=True))
    alone = of_trainer(trainer, trainer.model, {}).model
    trainer.processing_class = tokenizer
    before = of_trainer(trainer, trainer.model, {}).model
    assert (alone["model.config.pad_token_id"], before["model.config.pad_token_id"]) == (0, 256)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(trainer.model.config, name, 256)
    assert of_trainer(trainer, trainer.model, {}).model == before
    tokenizer.pad_token = "a"
    assert of_trainer(trainer, trainer.model, {}).model != before
