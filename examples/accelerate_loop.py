"""A training loop with Accelerate, on any number of ranks.

    accelerate launch examples/accelerate_loop.py photos.store

Do not pass the loader to `accelerator.prepare`, which would leave it unchanged. A torch `DataLoader` around it would be
wrapped in one that splits each rank's share again over all ranks, copies to the device on the compute stream, and waits for
the next batch before it returns the current one. Here each rank's loader reads its own share to its own device.
"""

import sys
import time

import torch
from accelerate import Accelerator

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.plan.order import Purpose, normal

STEPS, ACCUMULATION = 4, 2


def main(store: str, folder: str) -> None:
    """Train a convolution to separate noise from latents, save everything, and resume from there."""
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=not torch.cuda.is_available())
    loader = Loader(
        store,
        LoaderConfig(batch_size=2, accumulation=ACCUMULATION, caption_dropout=0.1),
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        device=accelerator.device,
    )
    channels = next(iter(Loader(store, LoaderConfig(batch_size=2)))).scaled().shape[1]
    torch.manual_seed(0)
    model = torch.nn.Conv2d(channels, channels, 3, padding=1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.register_for_checkpointing(loader)  # it has `state_dict` and `load_state_dict`

    def train(steps: int) -> None:
        for batch in loader.forever():  # counted in steps; a `for batch in loader` is one epoch
            with accelerator.accumulate(model):
                latents = batch.scaled()
                noise = normal(batch.keys, Purpose.NOISE, tuple(latents.shape[1:]))  # the same on any number of ranks
                loss = (model(latents + noise) - noise).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if batch.step + 1 == steps and batch.micro_step + 1 == ACCUMULATION:
                break

    train(STEPS)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # rank 0 writes
    accelerator.load_state(folder)
    train(2 * STEPS)
    state = loader.state_dict()
    weights = sum(float(weight.detach().double().sum()) for weight in model.parameters())
    print(f"rank {accelerator.process_index}: step {state['step']}, weights {weights:.9f}")
    loader.close()
    accelerator.end_training()
    time.sleep(0.2)  # gloo's threads release their last tensors, for which they need the GIL (pytorch/pytorch#179291)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "accelerate-run")
