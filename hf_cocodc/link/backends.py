"""What `regions.link` comes to, as far as one machine knows, and which process groups of torch.distributed it can make."""

import torch
import torch.distributed as dist

from ..errors import InputError, short
from ..settings import RegionConfig
from .process_group import REASONS, SEALED, Circumstances, Payloads, choose


def why_tcp(regions: RegionConfig, has_secret: bool) -> str:
    """Why these settings keep link "auto" from a process group, however near the regions are: one of `process_group.REASONS`."""
    if has_secret:
        return SEALED
    asked = [*regions.of_tcp, *(["announce"] if regions.announced else [])]
    return f"regions.{asked[0]} is set" if asked else ""


def payloads_of(regions: RegionConfig, has_secret: bool, device: torch.device, host: str) -> Payloads:
    """How payloads travel in a run with these settings; see `Payloads`."""
    return Payloads(regions.link, device, host, regions.timeout_s, why_tcp(regions, has_secret))


def expected(regions: RegionConfig, has_secret: bool, rtt_s: float) -> tuple[str, str]:
    """How payloads would travel between regions with these settings and this round trip, and why, as `choose` has it. Launches
    and GPUs are not known here.
    """
    why = why_tcp(regions, has_secret)
    if why and regions.link == "auto":
        return "tcp", why
    return choose(regions.link, (0, 1), [Circumstances(REASONS.index(why), rtt_s, 0, 0)] * 2)


def refuse_backend(link: str, device: str = "cuda", regions_here: int = 1) -> None:
    """Check that processes of this machine can have the link that `regions.link` names. Does not start CUDA.

    Args:
        device: the kind of device that the model is on.
        regions_here: number of regions on this machine.

    Raises InputError if they cannot.
    """
    version = f"torch {torch.__version__}"
    if link == "gloo" and not dist.is_gloo_available():
        raise InputError(
            f"regions.link=gloo: {version} has no gloo on this machine. Set regions.link=tcp in every region."
        )
    if link != "nccl":
        return
    devices = torch.cuda.device_count()
    if device != "cuda":
        why = f"this model is on the device {device!r}"
    elif not devices:
        why = f"{version} finds none on this machine"
    elif not dist.is_nccl_available():
        why = f"{version} has no NCCL on this machine"
    elif devices < regions_here:
        why = f"this machine has {devices} for {regions_here} regions, and each needs one of its own"
    else:
        return
    raise InputError(
        f"regions.link=nccl moves payloads between CUDA devices, but {why}. Set regions.link=gloo, or regions.link=tcp, in "
        "every region."
    )


def why_no_gloo(host: str) -> str | None:
    """Why this machine cannot make a gloo group at its own address `host`; None if it can."""
    if not dist.is_gloo_available():
        return f"torch {torch.__version__} has no gloo on this machine"
    try:
        dist.ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        return f"gloo cannot listen at {host} ({short(error, 100)})"
    return None
