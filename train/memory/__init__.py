"""Where the trainer's memory goes, and what makes it less."""
