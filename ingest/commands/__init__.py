"""The subcommands of `ingest`, one per file; `ingest/cli.py` lists them."""
