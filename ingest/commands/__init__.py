"""The subcommands of `ingest` that show samples, one per file; `ingest/cli.py` registers them."""
