"""The arguments with which every command takes a recipe."""

import argparse


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and `--set`, which become `options.recipe` and `options.overrides`."""
    parser.add_argument(
        "recipe", help="recipe: a YAML file, or one that comes with the package: quickstart/METHOD"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change a value of the recipe, for example outer.sync_interval=50; may be given more than once",
    )
