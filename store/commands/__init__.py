"""The subcommands of `store`, one per file: options, `run` and printed output. `store/cli.py` registers them.

Those that change a store are in `change/`, those that only object storage needs in `remote/`.
"""
