"""Where a model's transformer blocks are."""

from torch import nn


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the transformer blocks, in order.

    Every `PreTrainedModel` with blocks lists their classes in `_no_split_modules`. The blocks are the outermost modules of
    these classes, compared by the class name before FSDP2 renamed it. If there are fewer than two, the blocks are the children
    of the `ModuleList` with the most parameters.
    """
    classes: set[str] = set()
    for module in model.modules():
        classes.update(getattr(module, "_no_split_modules", None) or ())
    repeated = [
        name
        for name, module in model.named_modules()
        if type(module).__name__.removeprefix("FSDP") in classes
    ]
    blocks = [name for name in repeated if not any(name.startswith(f"{other}.") for other in repeated)]
    if len(blocks) > 1:
        return blocks
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        return blocks
    largest = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    return [f"{largest}.{child}" if largest else child for child, _ in lists[largest].named_children()]
