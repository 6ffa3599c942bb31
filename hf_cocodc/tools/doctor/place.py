"""Findings about the machine itself: packages, devices, memory and disk."""

from pathlib import Path

from ...run.figures import amount
from ...run.gpus import shares, sharing
from .facts import OK, WARN, WRONG, Disk, Finding, Machine, unknown
from .needs import Needs

_TIGHT = 1.2
"""Free memory below this multiple of a need is a warning: batches, other processes and the page cache take memory too."""


def versions(machine: Machine) -> Finding:
    """Whether the installed packages meet this one's requirements."""
    if machine.unmet:
        words = [f"needs {need}, has {there or 'none'}" for need, there in machine.unmet.items()]
        command = f"pip install {' '.join(repr(need) for need in machine.unmet)}"
        return Finding("versions", WRONG, f"{'; '.join(words)}.", command)
    return Finding("versions", OK, ", ".join(f"{name} {each}" for name, each in machine.versions.items()))


def devices(machine: Machine, regions_here: int, use_cpu: bool) -> Finding:
    """Whether torch can use the devices of this machine, and whether regions share them."""
    cpu = f"the CPU ({machine.cores} cores)"
    if use_cpu:
        return Finding("devices", OK, f"training.use_cpu: trains on {cpu}")
    if machine.unused:
        return Finding(
            "devices",
            WRONG,
            f"the driver has {machine.unused} GPU(s), and torch {machine.versions.get('torch')} can use none of them: it would "
            f"train on {cpu}.",
            "pip install --force-reinstall torch    # a build with CUDA, which fits the driver (nvidia-smi)",
        )
    if machine.accelerator is not None:
        return Finding("devices", OK, f"{machine.accelerator}; its memory is not known here")
    if not machine.devices:
        return Finding("devices", OK, f"no GPU: trains on {cpu}")
    words = ", ".join(f"{each.name} ({each.total / 1e9:.0f} GB)" for each in machine.devices)
    shared = sharing(len(machine.devices), regions_here)
    if shared is not None:
        return Finding(
            "devices",
            WARN,
            f"{words}. {shared}",
            "hf-cocodc train RECIPE --region 0 --coordinator HOST:PORT    # one region here, the others elsewhere",
        )
    return Finding("devices", OK, words)


def memory(machine: Machine, needs: Needs | None, regions_here: int, use_cpu: bool) -> list[Finding]:
    """Whether what a run takes fits into the free memory of the devices and the host."""
    if needs is None:
        return [unknown("memory", "an adapter's base model is not known before it is loaded: not computed")]
    findings = []
    host = needs.outer_on_host
    if machine.devices and not use_cpu:
        taken = [each for own in shares(range(len(machine.devices)), regions_here) for each in own]
        tightest = min(set(taken), key=lambda each: machine.devices[each].free / taken.count(each))
        device, models = machine.devices[tightest], taken.count(tightest)
        on = "on a rank that holds the whole model" if models == 1 else f"which {models} regions share"
        findings.append(
            _fits(
                "GPU memory",
                f"{device.name}, {on}",
                models * (needs.training + needs.outer_on_device),
                device.free,
                device.total,
                "nvidia-smi    # which processes hold it",
                "smaller parts (FSDP2 over more ranks, an adapter), or a smaller model, and outer.device=host"
                + (", or fewer regions here" if models > 1 else ""),
            )
        )
    else:
        host += needs.training + needs.outer_on_device
    findings.append(
        _fits(
            "memory",
            "this machine" if regions_here == 1 else f"{regions_here} regions on this machine",
            host * regions_here,
            machine.available,
            machine.total,
            "ps aux --sort=-rss | head    # which processes hold it",
            "a smaller model or model.dtype=bfloat16, fewer regions here"
            + (", outer.device=model" if machine.devices else ""),
        )
    )
    return findings


def _fits(topic: str, where: str, need: int, free: int, total: int, who: str, remedy: str) -> Finding:
    words = f"{where}: weights, inner optimizer and outer state take at least {amount(need)}, "
    words += f"{amount(free)} of {amount(total)} are free"
    if need > total:
        return Finding(topic, WRONG, f"{words}. It cannot fit: take {remedy}.")
    if need > free:
        return Finding(topic, WRONG, f"{words}. End other processes, or take {remedy}.", who)
    if need * _TIGHT > free:
        return Finding(
            topic, WARN, f"{words}, and batches come on top. If it does not fit, take {remedy}.", who
        )
    return Finding(topic, OK, f"{words} (batches come on top)")


def disk(disk: Disk, folder: Path, needs: Needs | None, regions_here: int) -> Finding:
    """Whether the checkpoints of a run fit on the disk."""
    if not disk.is_writable:
        return Finding(
            "disk",
            WRONG,
            f"{disk.folder} cannot be written to, and training.output_dir={folder} lies there.",
            "hf-cocodc train RECIPE --set training.output_dir=FOLDER    # or chown the folder",
        )
    free = f"{amount(disk.free)} of {amount(disk.total)} are free at {disk.folder}"
    if needs is None:
        return Finding(
            "disk", OK if disk.free > 10e9 else WARN, f"{free}; the size of a checkpoint is not known"
        )
    one, most = needs.checkpoint * regions_here, needs.checkpoints
    where = f" in {regions_here} regions" if regions_here > 1 else ""
    how = {None: "how many there will be is not known: nothing limits them", 0: "none is kept"}
    words = (
        f"a checkpoint takes about {amount(one)}{where}, {how.get(most, f'at most {most} at once')}; {free}"
    )
    if disk.free < one:
        return Finding("disk", WRONG, words, f"df -h {disk.folder}; du -xsh {disk.folder}/* | sort -h")
    if disk.free < one * (10 if most is None else most):
        return Finding("disk", WARN, words, "hf-cocodc train RECIPE --set training.save_total_limit=2")
    return Finding("disk", OK, words)
