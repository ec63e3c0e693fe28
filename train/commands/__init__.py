"""The trainer's other commands by name: each is imported when it is run."""

from bucketline.command_line import commands

DESCRIPTION = "Train a model (its options: --help), or:"
COMMANDS = commands(
    "train",
    {
        "presets": "bucketline.train.commands.presets:TrainPresets",
        "report": "bucketline.train.commands.report:TrainReport",
    },
)
