"""The settings of this package as flags of a script, with a prefix, so that they do not meet the script's own."""

import argparse
import contextlib
import dataclasses
from typing import Any

from transformers import HfArgumentParser

from ..settings import OuterConfig, RegionConfig
from ..settings.fields import hints_of


def script_parser(*kinds: type, parser: type = HfArgumentParser, **options: Any) -> Any:
    """A parser of a script's own dataclasses, and of the settings of hf_cocodc: `--outer_...` and `--region_...`.

    ::

        parser = script_parser(TrainingArguments)
        args, outer, regions = parser.parse_args_into_dataclasses()
        trainer = Trainer(..., args=args, callbacks=[CoCoDCCallback(outer, regions)])

    The flag of `OuterConfig.sync_interval` is `--outer_sync_interval`, that of `RegionConfig.count` is `--region_count`.
    `outer_lr`, `outer_momentum` and `region` have the prefix already. A flag without it is refused, and the message names the new
    one, unless one of `kinds` has such a flag.

    Args:
        kinds: dataclasses, for example `TrainingArguments`. The parser gives their objects first, then an `OuterConfig` and a
            `RegionConfig`.
        parser: the class of the parser, for example `trl.TrlParser`.
        options: for that class, such as `description`.
    """
    names = {
        kind: {each.name: _flag(prefix, each.name) for each in dataclasses.fields(kind)}
        for kind, prefix in ((OuterConfig, "outer"), (RegionConfig, "region"))
    }
    made = parser((*kinds, *(_prefixed(kind, flags) for kind, flags in names.items())), **options)
    for flags in names.values():
        for name, flag in flags.items():
            if name == flag:
                continue
            for old in {f"--{name}", f"--{name.replace('_', '-')}"}:
                with contextlib.suppress(argparse.ArgumentError):  # it is a flag of the script
                    made.add_argument(
                        old,
                        action=_Renamed,
                        const=f"--{flag}",
                        nargs="?",
                        dest=argparse.SUPPRESS,
                        default=argparse.SUPPRESS,
                        help=argparse.SUPPRESS,
                    )
    return made


def _flag(prefix: str, name: str) -> str:
    return name if name == prefix or name.startswith(f"{prefix}_") else f"{prefix}_{name}"


def _prefixed(kind: Any, flags: dict[str, str]) -> type:
    """A dataclass whose fields have other names, and whose constructor makes a `kind`."""

    def make(cls: type, **given: Any) -> Any:
        return kind(**{name: given[flag] for name, flag in flags.items() if flag in given})

    fields = [
        (
            flags[each.name],
            hints_of(kind)[each.name],
            dataclasses.field(default=each.default, metadata=each.metadata),
        )
        for each in dataclasses.fields(kind)
    ]
    of_class = {"__new__": make, "_argument_group_name": f"hf_cocodc {kind.SECTION}"}
    return dataclasses.make_dataclass(f"{kind.__name__}Flags", fields, namespace=of_class, kw_only=True)


class _Renamed(argparse.Action):
    """Refuses a flag of a setting that lacks its prefix."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None
    ) -> None:
        parser.error(f"{option} is {self.const}: flags of hf_cocodc have a prefix")
