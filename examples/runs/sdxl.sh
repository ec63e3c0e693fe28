#!/bin/sh
# SDXL, all weights.
#   examples/runs/sdxl.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# `bucketline train presets sdxl` prints its options; those given here override them.
# PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train sdxl "$@"
