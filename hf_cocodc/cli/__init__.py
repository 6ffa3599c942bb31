"""The command `hf-cocodc`. Each subcommand has one file, which parses, calls the package, prints and returns an exit code.

May import: bench, doctor, emulation, errors, meeting, methods, newer, parts, planning, recipes, run, settings, training, views.
"""
