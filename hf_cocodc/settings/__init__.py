"""What users write: the settings of a run as frozen dataclasses, and recipes, which hold them. Nothing here imports torch.

`OuterConfig` and `RegionConfig` are flat, and each field has a help text: `hf_cocodc.script_parser` turns them into flags, and
`help` shows them. Fields that most runs leave alone (`fields.expert`) come last. A field that is None takes the default of the
method (`methods.py`) or, in `RegionConfig`, the value from the environment.
"""

from .outer import OF_EVERY_METHOD, OuterConfig
from .regions import RegionConfig

__all__ = ["OF_EVERY_METHOD", "OuterConfig", "RegionConfig"]
