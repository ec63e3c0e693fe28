#!/bin/sh
# SDXL, all weights.
#   examples/runs/sdxl.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# Options given here override those below. PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train \
  --learning-rate 4e-6 --warmup-steps 1000 --batch-size 4 --accumulation 4 --caption-dropout 0.1 --precision bf16 \
  --gradient-checkpointing \
  "$@"
