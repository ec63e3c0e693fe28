#!/bin/sh
# Stable Diffusion 3 or 3.5, all weights.
#   examples/runs/sd3.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# `bucketline train presets sd3` prints its options; those given here override them.
# PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train sd3 "$@"
