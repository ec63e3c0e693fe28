#!/bin/sh
# PixArt-Alpha or PixArt-Sigma, all weights.
#   examples/runs/pixart.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# `bucketline train presets pixart` prints its options; those given here override them.
# PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train pixart "$@"
