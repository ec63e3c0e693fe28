"""The model of a run: its device, loaded when it is needed, and noted in the store."""
