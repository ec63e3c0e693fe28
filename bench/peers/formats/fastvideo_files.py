"""Write Parquet files by FastVideo's own records, schema and writer, in its own environment.

`python -m bucketline.bench.peers.formats.fastvideo_files ARRAYS FOLDER` writes the samples of an npz file, `NUMBER/NAME` each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bucketline.bench.peers.formats.importable import make_torchvision_importable, without_init


def write(arrays: Path, folder: Path) -> None:
    """Write all samples as images of one frame."""
    make_torchvision_importable()
    without_init("fastvideo", "fastvideo.dataset", "fastvideo.dataset.dataloader", "fastvideo.pipelines")
    from fastvideo.dataset.dataloader.parquet_io import ParquetDatasetWriter, records_to_table
    from fastvideo.dataset.dataloader.record_schema import basic_t2v_record_creator
    from fastvideo.dataset.dataloader.schema import pyarrow_schema_t2v

    with np.load(arrays) as found:
        numbers = sorted({name.partition("/")[0] for name in found.files}, key=int)
        batch = SimpleNamespace(
            video_file_name=[str(found[f"{n}/id"]) for n in numbers],
            prompt=[str(found[f"{n}/caption"]) for n in numbers],
            latents=[found[f"{n}/latent"][:, None] for n in numbers],
            prompt_embeds=[found[f"{n}/tokens"] for n in numbers],
            height=[int(found[f"{n}/original"][0]) for n in numbers],
            width=[int(found[f"{n}/original"][1]) for n in numbers],
            fps=[1.0] * len(numbers),
            num_frames=[1] * len(numbers),
        )
    writer = ParquetDatasetWriter(str(folder), samples_per_file=len(numbers))
    writer.append_table(records_to_table(basic_t2v_record_creator(batch), pyarrow_schema_t2v))
    written = writer.flush(num_workers=1, write_remainder=True)
    assert written == len(numbers), f"FastVideo's writer says {written} of {len(numbers)} rows"


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
