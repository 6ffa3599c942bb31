"""The contestants: one function each, around the same model and inner optimizer.

A function gets its place, the model's shape, the number of inner steps between two syncs, and its own settings. It connects
the regions and returns the `Part` that the common loop calls. Rows of the same algorithm have the same settings.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from .workload import FRAGMENTS, OVERLAP, Region, inner_optimizer, model_of

TIMEOUT_S = 120
SECRET = "5ec2e7" * 10 + "5ec2"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The parts of a contestant that the loop needs."""

    model: nn.Module
    optimizer: Any
    waits_in: tuple[str, ...]
    """Phases of an inner step that wait for communication: forward, backward, optimizer, sync."""
    backward: Callable[[Tensor], Any] = lambda loss: loss.backward()
    sync: Callable[[], Any] = lambda: None
    weights: Callable[[], list[Tensor]]
    """Copies of the weights that this contestant would save now as the model."""
    chunk: int
    """Inner steps between two checks of the clock."""
    alive: Any = None
    """Objects that must live as long as the part."""


def nothing(place: Region, shape: dict[str, int], interval: int) -> Part:
    """No link: the regions train side by side, each alone."""
    model = model_of(shape)
    return Part(
        model=model,
        optimizer=inner_optimizer(model),
        waits_in=("sync",),
        weights=lambda: _copies(model.parameters()),
        chunk=interval,
    )


def ddp(place: Region, shape: dict[str, int], interval: int) -> Part:
    """Accelerate's DDP with its defaults, over gloo; it communicates at every step."""
    accelerator, model, optimizer = _accelerated(place, shape)
    return Part(
        model=model,
        optimizer=optimizer,
        waits_in=("forward", "backward"),
        backward=accelerator.backward,
        weights=lambda: _copies(model.parameters()),
        chunk=2,
    )


def local_sgd(place: Region, shape: dict[str, int], interval: int) -> Part:
    """Accelerate's LocalSGD: the mean of the parameters, with one reduce per tensor."""
    from accelerate.local_sgd import LocalSGD

    accelerator, model, optimizer = _accelerated(place, shape)
    loop = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=interval, enabled=True)
    loop.__enter__()
    return Part(
        model=model,
        optimizer=optimizer,
        waits_in=("sync",),
        backward=accelerator.backward,
        sync=loop.step,
        weights=lambda: _copies(model.parameters()),
        chunk=interval,
    )


def torchft(
    place: Region,
    shape: dict[str, int],
    interval: int,
    fragments: int = 1,
    buckets: bool = False,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
) -> Part:
    """torchft's DiLoCo, or its Streaming DiLoCo with several fragments. `buckets` joins tensors into one all-reduce."""
    model = model_of(shape)
    inner = inner_optimizer(model)
    settings = fragments, buckets, outer_lr, outer_momentum
    parts, outer, alive = torchft_around(place, model, inner, interval, *settings)

    def weights() -> list[Tensor]:
        kept = {}
        for part, fragment in zip(parts, outer._fragments, strict=True):
            kept.update(
                {id(param): fragment.original_parameters[name] for name, param in part.named_parameters()}
            )
        return _copies(kept[id(param)] for param in model.parameters())

    return Part(
        model=model,
        optimizer=inner,
        waits_in=("optimizer",),
        weights=weights,
        chunk=interval,
        alive=(alive, outer),
    )


def torchft_around(
    place: Region,
    model: nn.Module,
    inner: torch.optim.Optimizer,
    interval: int,
    fragments: int = 1,
    buckets: bool = False,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    overlap: int = OVERLAP,
) -> tuple[list[nn.Module], Any, Any]:
    """Let torchft synchronize a model at its optimizer's steps. Returns its fragments, its DiLoCo, and what must live as long."""
    os.environ["OTEL_SDK_DISABLED"] = "true"
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    store = dist.TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
    lighthouse = (
        LighthouseServer(bind=f"[::]:{place.port}", min_replicas=place.count, join_timeout_ms=10_000)
        if place.region == 0
        else None
    )
    parts = [model] if fragments == 1 else _blocks(model, fragments)
    momentum: dict[str, Any] = {"momentum": outer_momentum, "nesterov": True} if outer_momentum else {}
    outers = [torch.optim.SGD(part.parameters(), lr=outer_lr, **momentum) for part in parts]
    timeout = timedelta(seconds=TIMEOUT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        min_replica_size=place.count,
        use_async_quorum=False,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        replica_id=f"region_{place.region}",
        hostname=place.address,
        store_addr=place.address,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{place.first}:{place.port}",
        timeout=timeout,
        quorum_timeout=timeout,
        init_sync=False,
    )
    outer = DiLoCo(
        manager,
        parts,
        inner,
        outers,
        sync_every=interval,
        use_bucketization=buckets,
        fragment_sync_delay=0 if fragments == 1 else overlap,
        fragment_update_alpha=0.0 if fragments == 1 else 0.5,
    )
    outer.__enter__()
    return parts, outer, (store, lighthouse)


def nvflare(
    place: Region, shape: dict[str, int], interval: int, outer_lr: float = 1.0, outer_momentum: float = 0.0
) -> Part:
    """NVFlare's Client API, in the process of a site (see `federated`). The outer values are those of the server's job."""
    import nvflare.client as flare

    from .federated import PREFIX

    model = model_of(shape)
    steps = 0

    def receive() -> None:
        if not flare.is_running():
            raise RuntimeError("NVFlare has ended the job")
        got = flare.receive().params
        model.load_state_dict({name.removeprefix(PREFIX): torch.as_tensor(got[name]) for name in got})

    def sync() -> None:
        nonlocal steps
        steps += 1
        if steps % interval == 0:
            local = {f"{PREFIX}{name}": value.clone() for name, value in model.state_dict().items()}
            flare.send(flare.FLModel(params=local, meta={"NUM_STEPS_CURRENT_ROUND": interval}))
            receive()

    receive()
    return Part(
        model=model,
        optimizer=inner_optimizer(model),
        waits_in=("sync",),
        sync=sync,
        weights=lambda: _copies(model.parameters()),
        chunk=interval,
    )


def ours(
    place: Region,
    shape: dict[str, int],
    interval: int,
    link: str = "tcp",
    encrypted: bool = False,
    **outer_config: Any,
) -> Part:
    """hf_cocodc with the plain Accelerate loop, and `RegionConfig`'s defaults but for the link and the congestion control."""
    from accelerate import Accelerator

    from hf_cocodc import OuterConfig, OuterOptimizer
    from hf_cocodc.coordinator.server import serve_in_thread
    from hf_cocodc.net.keys import Keys
    from hf_cocodc.settings import RegionConfig
    from hf_cocodc.settings.environment import ENV_SECRET

    secrets = [Keys.from_secret(SECRET)] if encrypted else []
    if encrypted:
        os.environ[ENV_SECRET] = SECRET
    server = serve_in_thread("0.0.0.0", place.port, secrets) if place.region == 0 else None
    accelerator = Accelerator(cpu=True)
    bare = model_of(shape)
    model, optimizer = accelerator.prepare(bare, inner_optimizer(bare))
    regions = RegionConfig(
        region=place.region,
        count=place.count,
        coordinator=f"{place.first}:{place.port}",
        timeout_s=TIMEOUT_S,
        link=link,
        # all rows have that of the link; gloo's sockets have it in any case
        congestion="system" if link == "tcp" else "auto",
    )
    config = OuterConfig(sync_interval=interval, **outer_config)
    outer = OuterOptimizer(accelerator, model, optimizer, config, regions)

    def weights() -> list[Tensor]:
        with outer.own_global_weights():
            return _copies(bare.parameters())

    return Part(
        model=model,
        optimizer=optimizer,
        waits_in=("sync",),
        backward=accelerator.backward,
        sync=outer.step,
        weights=weights,
        chunk=interval,
        alive=server,
    )


def _accelerated(place: Region, shape: dict[str, int]) -> tuple[Any, nn.Module, Any]:
    """One world of all regions, as from `accelerate launch` with one process per machine."""
    os.environ.update(
        RANK=str(place.region),
        WORLD_SIZE=str(place.count),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=place.first,
        MASTER_PORT=str(place.port),
        ACCELERATE_USE_CPU="true",
    )
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == place.count
    model = model_of(shape)
    return accelerator, *accelerator.prepare(model, inner_optimizer(model))


def _blocks(model: Any, count: int) -> list[nn.Module]:
    """`count` parts of a Llama, each with every count-th block, as in our `strided` pattern.

    The embeddings belong to the first part, the last norm and the head to the last part.
    """
    parts = [nn.ModuleList(list(model.model.layers[start::count])) for start in range(count)]
    parts[0].append(model.model.embed_tokens)
    parts[-1].extend([model.model.norm, model.lm_head])
    return list(parts)


def _copies(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@dataclass(frozen=True)
class Contestant:
    """A row of the table: a library, a method and its settings."""

    by: str
    method: str
    make: Callable[..., Part]
    settings: dict[str, Any]
    default: bool = True
    in_cluster: bool = False
    """Whether it needs the short round trips of a cluster."""
    has_processes: bool = False
    """Whether it trains in processes of its own (`federated`)."""

    @property
    def name(self) -> str:
        return f"{self.method} ({self.by})" if self.by else self.method


_STREAM = {"outer_lr": 0.5, "outer_momentum": 0.5}
_PARTS = {"num_fragments": FRAGMENTS, **_STREAM}
_ROUND = {"outer_lr": 1.0, "outer_momentum": 0.0}
_NESTEROV = {"outer_lr": 0.7, "outer_momentum": 0.9}
_STREAMING = {"method": "streaming", "overlap_steps": OVERLAP, **_PARTS}

CONTESTANTS = [
    Contestant("", "no link", nothing, {}),
    Contestant("accelerate", "DDP", ddp, {}),
    Contestant("accelerate", "LocalSGD", local_sgd, {}),
    Contestant("torchft", "DiLoCo", torchft, _ROUND),
    Contestant("torchft", "DiLoCo, buckets", torchft, {"buckets": True, **_ROUND}),
    Contestant("torchft", "Streaming", torchft, {"fragments": FRAGMENTS, **_STREAM}),
    Contestant(
        "torchft", "Streaming, buckets", torchft, {"fragments": FRAGMENTS, "buckets": True, **_STREAM}
    ),
    Contestant("NVFlare", "FedOpt, Nesterov, mTLS", nvflare, _NESTEROV, has_processes=True),
    Contestant(
        "ours", "DiLoCo, Nesterov, encrypted", ours, {"method": "diloco", "encrypted": True, **_NESTEROV}
    ),
    Contestant("ours", "DiLoCo fp32", ours, {"method": "diloco", **_ROUND}),
    Contestant("ours", "DiLoCo int8", ours, {"method": "diloco", "codec": "int8", **_ROUND}),
    Contestant("ours", "Streaming fp32", ours, {"codec": "fp32", **_STREAMING}, default=False),
    Contestant("ours", "Streaming int8", ours, {"codec": "int8", **_STREAMING}, default=False),
    Contestant("ours", "Streaming fp4", ours, _STREAMING),
    Contestant(
        "ours", "DiLoCo fp32, gloo", ours, {"method": "diloco", "link": "gloo", **_ROUND}, in_cluster=True
    ),
    Contestant("ours", "Streaming fp4, gloo", ours, {"link": "gloo", **_STREAMING}, in_cluster=True),
    Contestant("ours", "Eager fp32", ours, {"method": "eager", **_STREAM}),
    Contestant("ours", "CO2 fp32", ours, {"method": "co2", **_ROUND}),
    Contestant(
        "ours", "DiLoCoX lowrank", ours, {"method": "dilocox", "outer_lr": 0.3, "outer_momentum": 0.0}
    ),
    Contestant("ours", "CoCoDC fp32", ours, {"method": "cocodc", **_PARTS}),
    Contestant("ours", "CoCoDC int8", ours, {"method": "cocodc", "codec": "int8", **_PARTS}),
]
