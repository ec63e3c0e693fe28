#!/bin/sh
# SDXL, LoRA adapters.
#   examples/runs/sdxl-lora.sh --store photos.store --model path/to/model --output-dir runs/a --max-steps 20000
# `bucketline train presets sdxl-lora` prints its options; those given here override them.
# PET_NPROC_PER_NODE=8 (read by torchrun) starts eight processes.
exec torchrun -m bucketline.train sdxl-lora "$@"
