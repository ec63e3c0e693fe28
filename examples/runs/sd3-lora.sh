#!/bin/sh
# Stable Diffusion 3 or 3.5, LoRA adapters.
#   examples/runs/sd3-lora.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# `bucketline train presets sd3-lora` prints its options; those given here override them.
# PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train sd3-lora "$@"
