"""The contact sheet of `ingest scan --output`: the crops that lose most of their images."""
