"""The commands of `store`, one a file: what each is told, how it is run, what it prints. `store/cli.py` lists them."""
