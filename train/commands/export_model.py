"""`bucketline export-model`: write a run's weights as one file, or as a folder, that other tools open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bucketline.command_line import human_bytes, print_json
from bucketline.options import Arg, Positional


@dataclass(frozen=True, kw_only=True)
class ExportModel:
    """Write a run's weights as one .safetensors file in the original key layout, as a folder, or as a whole pipeline.

    A file has the names, the VAE and the text encoders of the checkpoint that the run began from (or of --like), and the
    trained UNet or transformer: Stable Diffusion 1 to 3, SDXL and Flux. diffusers' `from_single_file` reads it back to the same
    tensors. A folder has only the trained weights, of any model or LoRA, for `from_pretrained`, `load_lora_weights` or peft.
    With --pipeline it has the model's other parts too, for `DiffusionPipeline.from_pretrained`.

    Example: bucketline export-model runs/a photos-model --pipeline --dtype bf16
    """

    folder: Annotated[Positional[Path], Arg(metavar="RUN")]
    """Folder of a run, whose newest complete checkpoint is taken, or of one checkpoint."""
    output: Annotated[Positional[Path], Arg(metavar="OUTPUT")]
    """The .safetensors file or the folder to write; must not exist yet."""
    like: Annotated[Path | None, Arg(metavar="MODEL")] = None
    """Model of the same architecture to take a file's names and the other parts from; default: the run's own --model."""
    pipeline: bool = False
    """Write a folder with copies of the other parts of the model, too."""
    last: bool = False
    """Write the last weights instead of their moving average."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Data type of the trained weights; other parts stay as they are in the checkpoint."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.errors import StateError
        from bucketline.extensions import extra_named

        if not self.folder.is_dir():
            raise StateError(f"{self.folder} is not a folder; name a run's folder or one of its checkpoints")
        with extra_named("train"):
            from bucketline.train.export import export_model

            num_bytes = export_model(
                self.folder, self.output, like=self.like, last=self.last, dtype=self.dtype, pipeline=self.pipeline
            )
        if self.json:
            print_json({"output": str(self.output), "num_bytes": num_bytes})
        else:
            print(f"{self.output}: {human_bytes(num_bytes)}")
        return 0
