"""Regions in a Ray cluster: one TorchTrainer for each, whose workers are the ranks of the region.

Each region learns to continue digits with a small Llama. Replace `train_region` by your own training. On a node of the cluster:

    pip install '.[ray]' && hf-cocodc secret new secret
    HF_COCODC_SECRET=$(cat secret) python recipes/launch/ray/regions.py --regions 2 --workers 2 --output /shared/runs/ray

With GPUs, add --gpu: each worker then has one.
"""

import argparse
import os
import subprocess
import sys
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_region(config: dict[str, Any]) -> None:
    """What each worker runs: an ordinary Trainer script, which is told its region."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig, region_shard

    region = RegionConfig(region=config["region"], count=config["regions"], coordinator=config["coordinator"])
    torch.manual_seed(0)
    rows = (torch.arange(512)[:, None] + torch.arange(32)) % 10
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=10,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=config["output"],
            max_steps=config["steps"],
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            use_cpu=not config["gpu"],
            report_to="none",
        ),
        train_dataset=region_shard(dataset, region),
        callbacks=[CoCoDCCallback(OuterConfig(method="diloco", sync_interval=10), region)],
    )
    trainer.train()
    trainer.save_model()


@ray.remote(num_cpus=0)
def fit(config: dict[str, Any], workers: int) -> None:
    """Run one region, beside the others."""
    TorchTrainer(
        train_region,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=config["gpu"]),
        run_config=RunConfig(
            name=f"region-{config['region']}", storage_path=os.path.join(config["output"], "ray")
        ),
    ).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--regions", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="ranks of each region")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--port", type=int, default=29650, help="of the coordinator, on this node")
    parser.add_argument("--output", required=True, help="a folder that all nodes share")
    options = parser.parse_args()
    if "HF_COCODC_SECRET" not in os.environ:
        parser.error("set HF_COCODC_SECRET: the nodes of a cluster reach the coordinator over the network")
    ray.init(runtime_env={"env_vars": {"HF_COCODC_SECRET": os.environ["HF_COCODC_SECRET"]}})
    host = ray.util.get_node_ip_address()
    command = ["-m", "hf_cocodc", "coordinator", "--host", host, "--port", str(options.port)]
    coordinator = subprocess.Popen([sys.executable, *command])
    try:
        config = {
            "regions": options.regions,
            "coordinator": f"{host}:{options.port}",
            "output": os.path.abspath(options.output),
            "steps": options.steps,
            "gpu": options.gpu,
        }
        ray.get([fit.remote({**config, "region": each}, options.workers) for each in range(options.regions)])
    finally:
        coordinator.terminate()
        coordinator.wait()


if __name__ == "__main__":
    main()
