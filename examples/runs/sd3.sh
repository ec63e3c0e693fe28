#!/bin/sh
# Stable Diffusion 3 or 3.5, all weights.
#   examples/runs/sd3.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# Options given here override those below. PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train \
  --learning-rate 1e-5 --warmup-steps 1000 --batch-size 8 --caption-dropout 0.1 --precision bf16 \
  --timestep-sampling logit_normal --gradient-checkpointing \
  "$@"
