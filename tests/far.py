"""A device that is none: its tensors lie on the CPU and compute there, but may not meet any that are on the host.

What a GPU would refuse fails here too, and numbers are real. Kernels, streams and pinned memory are not its business.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# Without a name of its own: torch would take one that has a name for this process's accelerator, in every test there is.
_setup_privateuseone_for_python_backend()
torch.privateuseone.is_available = lambda: False  # nor may libraries look for streams on it in other tests
FAR = torch.device("privateuseone:0")


class Far(Tensor):
    """A tensor on the device, around the CPU's that it stands for."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        far = Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=FAR,
        )
        far.near = near
        return far

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        copies = func in (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)
        mixed = any(not isinstance(each, Far) and each.dim() for each in given)
        if mixed and not copies:
            raise RuntimeError(f"{func} gets tensors of the host and of another device")
        stays = torch.device(kwargs.get("device") or FAR).type == FAR.type
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        found = func(*tree_map(_near, args), **tree_map(_near, kwargs))
        known = {id(each.near): each for each in given if isinstance(each, Far)}
        return tree_map(lambda each: known.get(id(each), _far(each)), found) if stays else found


def _near(value: Any) -> Any:
    return value.near if isinstance(value, Far) else value


def _far(value: Any) -> Any:
    return Far(value) if isinstance(value, Tensor) else value


def _empty(size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return Far(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return Far(torch.empty_strided(size, stride, dtype=dtype))


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
