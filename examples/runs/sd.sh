#!/bin/sh
# Stable Diffusion 1 or 2, all weights.
#   examples/runs/sd.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# Options given here override those below. PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train \
  --learning-rate 1e-5 --warmup-steps 500 --batch-size 16 --caption-dropout 0.1 --precision bf16 \
  "$@"
