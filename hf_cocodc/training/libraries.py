"""Imports what every region of a recipe imports, in the process from which they are forked."""

import contextlib
import gc

with contextlib.suppress(Exception):  # the region will fail in the same way, and say so
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Trainer  # noqa: F401

    from ..trainer import callback  # noqa: F401
    from . import train  # noqa: F401

gc.freeze()  # the collector would copy the pages that the processes share
