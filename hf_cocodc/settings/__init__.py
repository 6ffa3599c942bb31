"""What users write: the settings of a run as frozen dataclasses, and recipes, which hold them. Nothing here imports torch.

`OuterConfig` and `RegionConfig` are flat, and each field has a help text: `hf_cocodc.script_parser` turns them into flags, and
`help` shows them. Fields that most runs leave alone (`fields.expert`) come last. A field that is None takes the default of the
method (`methods.py`) or, in `RegionConfig`, the value from the environment.
"""

from .environment import (
    ENV_COORDINATOR,
    ENV_JOIN,
    ENV_LAUNCH,
    ENV_REGION,
    ENV_REGIONS,
    ENV_RESUME,
    ENV_RUN,
    ENV_SECRET,
    ENV_SECRET_FILE,
    ENV_SPLIT,
    MACHINES,
    check_alone,
    check_split,
    from_env,
    quiet_torch,
    warn_alone,
)
from .fields import check_host
from .outer import OF_EVERY_METHOD, OuterConfig
from .regions import RegionConfig

__all__ = [
    "ENV_JOIN",
    "ENV_LAUNCH",
    "ENV_REGION",
    "ENV_REGIONS",
    "ENV_RESUME",
    "ENV_RUN",
    "ENV_SECRET",
    "ENV_SECRET_FILE",
    "ENV_SPLIT",
    "ENV_COORDINATOR",
    "MACHINES",
    "OF_EVERY_METHOD",
    "OuterConfig",
    "RegionConfig",
    "check_alone",
    "check_host",
    "check_split",
    "from_env",
    "quiet_torch",
    "warn_alone",
]
