"""Where a model's transformer blocks are."""

from torch import nn

Block = tuple[str, ...]
"""Names of the modules of one block; several if a model keeps its attention and its MLPs in lists of their own."""
_Stack = dict[str, nn.Module]
"""Children of a module that numbers them (a ModuleList, a Sequential, a ModuleDict with keys 0, 1, ...), by full name."""


def find_blocks(model: nn.Module) -> list[Block]:
    """The transformer blocks of a model in order, of every part of a composite one (text, vision, audio).

    A stack is a module with numbered children. Its blocks are the children that have modules of their own: a list of embeddings
    or heads has none. Stacks inside a block (experts) do not count. Stacks of one length, side by side in one module, form
    blocks together (XLM). If no child of a stack has modules of its own, the blocks are the children of the stack with the most
    parameters.

    >>> def layer():
    ...     return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> find_blocks(nn.ModuleDict({"embed": nn.Embedding(4, 2), "layers": nn.ModuleList([layer(), layer()])}))
    [('layers.0',), ('layers.1',)]
    """
    stacks = _stacks(model, "")
    if not any(map(_deep, stacks)):
        return [(child,) for child in max(stacks, key=_numel, default={})]
    beside: dict[tuple[str, int], list[list[str]]] = {}
    for children in map(_deep, stacks):
        if children:
            home = children[0].rpartition(".")[0].rpartition(".")[0]
            beside.setdefault((home, len(children)), []).append(children)
    return [block for lists in beside.values() for block in zip(*lists, strict=True)]


def _stacks(module: nn.Module, prefix: str) -> list[_Stack]:
    """The outermost stacks, but not a Sequential around one whole model (sentence-transformers)."""
    children = {f"{prefix}{name}": child for name, child in module.named_children()}
    inside = [stack for name, child in children.items() for stack in _stacks(child, f"{name}.")]
    is_numbered = bool(children) and all(name.rpartition(".")[2].isdigit() for name in children)
    single = isinstance(module, nn.Sequential) and len(_deep(children)) == 1
    return inside if not is_numbered or (single and any(map(_deep, inside))) else [children]


def _deep(stack: _Stack) -> list[str]:
    """Names of the children that have modules of their own."""
    return [name for name, child in stack.items() if any(child.children())]


def _numel(stack: _Stack) -> int:
    return sum(param.numel() for child in stack.values() for param in child.parameters())
