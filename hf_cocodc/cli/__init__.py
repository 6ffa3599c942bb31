"""The command `hf-cocodc`. Each subcommand has one file, which parses, calls the package, prints and returns an exit code.

May import: bench, doctor, emulation, errors, meeting, planning, recipes, run, settings, training, views.
"""
