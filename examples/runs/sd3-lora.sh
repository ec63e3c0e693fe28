#!/bin/sh
# Stable Diffusion 3 or 3.5, LoRA adapters.
#   examples/runs/sd3-lora.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# Options given here override those below. PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train \
  --learning-rate 1e-4 --warmup-steps 100 --batch-size 4 --caption-dropout 0.05 --precision bf16 \
  --timestep-sampling logit_normal --lora-rank 16 --ema-decay 0.999 --gradient-checkpointing \
  "$@"
