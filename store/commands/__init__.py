"""The subcommands of `store`, one per file: options, `run` and printed output. `store/cli.py` registers them."""
