#!/bin/sh
# DiT, class-conditional, all weights.
#   examples/runs/dit.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# Options given here override those below. PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train \
  --learning-rate 1e-4 --warmup-steps 0 --batch-size 32 --caption-dropout 0.1 --precision bf16 \
  --weight-decay 0.0 \
  "$@"
