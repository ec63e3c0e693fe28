#!/bin/sh
# PixArt-Alpha or PixArt-Sigma, all weights.
#   examples/runs/pixart.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# Options given here override those below. PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train \
  --learning-rate 2e-5 --warmup-steps 1000 --batch-size 16 --caption-dropout 0.1 --precision bf16 \
  --weight-decay 0.03 --clip-norm 0.01 --gradient-checkpointing \
  "$@"
