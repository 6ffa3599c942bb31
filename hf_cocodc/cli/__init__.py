"""The command `hf-cocodc`. Each subcommand has one file, which parses, calls the package, prints and returns an exit code."""
