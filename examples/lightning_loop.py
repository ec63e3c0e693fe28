"""A training loop with Lightning and validation, stopped and resumed.

    python examples/lightning_loop.py photos.store

Lightning takes any iterable. A loader has `state_dict` and `load_state_dict`, so Lightning's own checkpoints store its
position. Lightning reads the length of an epoch once: with `partial` (or `drop`) all epochs are as long. A loader for
validation rewinds, so that each validation sees the same batches, also after the sanity check and with `limit_val_batches`.
"""

import sys

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from bucketline.loader import Batch, Loader, LoaderConfig, Remainder
from bucketline.loader.plan.order import Purpose, normal


class Denoiser(lightning.LightningModule):  # type: ignore[misc]
    """A convolution that learns to separate noise from latents."""

    def __init__(self, store: str, channels: int) -> None:
        super().__init__()
        self.store = store
        self.steps: list[int] = []
        self.model = torch.nn.Conv2d(channels, channels, 3, padding=1)

    def train_dataloader(self) -> Loader:
        """Return this rank's loader; the ranks and the device are known here."""
        return self._loader(LoaderConfig(batch_size=2, remainder=Remainder.PARTIAL, caption_dropout=0.1))

    def val_dataloader(self) -> Loader:
        """Return this rank's loader of the held-out samples."""
        return self._loader(LoaderConfig(batch_size=2, remainder=Remainder.PARTIAL, split="val", rewind=True))

    def _loader(self, config: LoaderConfig) -> Loader:
        return Loader(self.store, config, rank=self.trainer.global_rank, world_size=self.trainer.world_size, device=self.device)

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        self.steps.append(batch.step)
        return self._loss(batch)

    def validation_step(self, batch: Batch, _: int) -> None:
        """Log the loss of a batch."""
        self.log("val_loss", self._loss(batch), batch_size=len(batch.ids))

    def _loss(self, batch: Batch) -> torch.Tensor:
        latents = batch.scaled()
        noise = normal(batch.keys, Purpose.NOISE, tuple(latents.shape[1:]))
        error = (self.model(latents + noise) - noise).square().mean(dim=(1, 2, 3))
        loss: torch.Tensor = (error * batch.weight).sum() / batch.weight.sum().clamp(min=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main(store: str, folder: str) -> None:
    """Train four steps, then resume with the fifth from the checkpoint saved within the epoch."""
    channels = next(iter(Loader(store, LoaderConfig(batch_size=2)))).scaled().shape[1]
    for max_steps, saved in ((4, None), (8, f"{folder}/step=4.ckpt")):
        module = Denoiser(store, channels)
        trainer = lightning.Trainer(
            max_epochs=3,
            max_steps=max_steps,
            accelerator="auto",
            devices=1,
            default_root_dir=folder,
            logger=False,
            callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, ckpt_path=saved)
        print(f"trained the steps {module.steps}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "lightning-run")
