"""Loops of other frameworks read the epochs of an independent model: rows, order, draws and keys, also resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from bucketline.loader import Batch, BatchDataset, Loader, LoaderConfig, Remainder
from bucketline.store import Store
from tests.epoch_oracle import Micro, Oracle, as_micro, rows_of
from tests.kit import make_store, samples_of

pytestmark = pytest.mark.slow
BATCH = 4


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a store of 13 and 7 rows to train on, and 9 that are held out."""
    return make_store(tmp_path_factory.mktemp("loops") / "s", samples_of({"train/64x64": 13, "train/96x64": 7, "val/64x64": 9}))


def oracle(store: Store, split: str = "train", **changes: Any) -> Oracle:
    asked = {"rows": rows_of([(store, 1)], split), "batch_size": BATCH, "remainder": Remainder.PARTIAL, **changes}
    return Oracle(**asked)


def config(**changes: Any) -> LoaderConfig:
    return LoaderConfig(**{"batch_size": BATCH, "remainder": Remainder.PARTIAL, **changes})


@dataclass
class Watched:
    """Batches that a Lightning module was given, in order."""

    trained: list[Micro] = field(default_factory=list)
    validated: list[list[Micro]] = field(default_factory=list)


def fit(loader: Loader, validation: Loader, folder: Path, *, resume: str | None = None, **options: Any) -> Watched:
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import ModelCheckpoint

    seen = Watched()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(1, 1)

        def training_step(self, batch: Batch, _: int) -> torch.Tensor:
            seen.trained.append(as_micro(batch))
            return torch.as_tensor(self.model(torch.ones(1)).sum())

        def on_validation_epoch_start(self) -> None:
            seen.validated.append([])

        def validation_step(self, batch: Batch, _: int) -> None:
            seen.validated[-1].append(as_micro(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
        **options,
    )
    trainer.fit(Module(), loader, validation, ckpt_path=resume)
    return seen


@pytest.mark.filterwarnings("ignore")  # Lightning's own, of workers and of a run that is over
def test_lightning_trains_epoch_after_epoch_and_validates_on_the_same_batches(kept: Store, tmp_path: Path) -> None:
    train, held = oracle(kept), oracle(kept, "val", epochs=1).epoch(0)
    every = [one for epoch in range(3) for one in train.epoch(epoch)]
    validation = config(split="val", rewind=True)
    with Loader(kept, config()) as loader, Loader(kept, validation) as other:
        seen = fit(loader, other, tmp_path, max_epochs=3, num_sanity_val_steps=2, limit_val_batches=2)
    assert seen.trained == every
    assert seen.validated == [held[:2]] * 4  # the sanity check, and after each epoch
    each = len(train.epoch(0))
    for step in (2, each, each + 1):  # within an epoch, at its end, and after it
        with Loader(kept, config()) as loader, Loader(kept, validation) as other:
            again = fit(loader, other, tmp_path / "b", max_epochs=3, resume=str(tmp_path / f"step={step}.ckpt"))
        assert again.trained == every[step:], step
        assert again.validated[-1] == held


@pytest.mark.filterwarnings("ignore")
def test_lightning_ends_each_epoch_at_the_length_of_the_first(kept: Store, tmp_path: Path) -> None:
    """By `carry`, epochs differ in length: the last batch of a longer one is not trained on, also after a resume."""
    train = oracle(kept, remainder=Remainder.CARRY)
    epochs = [train.epoch(number) for number in range(3)]
    assert [len(epoch) for epoch in epochs] == [4, 5, 5]
    shown = [one for epoch in epochs for one in epoch[:4]]
    for resume, expected in ((None, shown), (str(tmp_path / "step=6.ckpt"), shown[6:])):
        carry = config(remainder=Remainder.CARRY)
        with Loader(kept, carry) as loader, Loader(kept, config(split="val", rewind=True)) as validation:
            assert fit(loader, validation, tmp_path, max_epochs=3, resume=resume).trained == expected


@pytest.mark.filterwarnings("ignore")
def test_a_limit_of_lightning_is_a_break(kept: Store, tmp_path: Path) -> None:
    train = oracle(kept)
    with Loader(kept, config()) as loader, Loader(kept, config(split="val", rewind=True)) as validation:
        seen = fit(loader, validation, tmp_path, max_epochs=3, limit_train_batches=2)
    assert seen.trained == [one for epoch in range(3) for one in train.epoch(epoch)[:2]]


@pytest.mark.parametrize("through", ["loader", "dataset"])
def test_accelerate_saves_and_resumes_within_an_epoch_and_at_its_end(kept: Store, tmp_path: Path, through: str) -> None:
    from accelerate import Accelerator

    train = oracle(kept, remainder=Remainder.CARRY, epochs=3)
    every = [one for epoch in range(3) for one in train.epoch(epoch)]

    def run(stop: int | None, folder: Path, begin: Path | None = None) -> list[Micro]:
        """Train from a folder's state, and save after a number of batches."""
        accelerator, seen = Accelerator(cpu=True), []
        with Loader(kept, config(remainder=Remainder.CARRY, epochs=3), device=accelerator.device) as loader:
            batches: Any = DataLoader(BatchDataset(loader), batch_size=None) if through == "dataset" else loader
            accelerator.register_for_checkpointing(loader)
            if begin is not None:
                accelerator.load_state(str(begin))
            for _ in range(loader.epoch, 3):
                for batch in batches:
                    seen.append(as_micro(batch))
                    if stop == len(seen):
                        accelerator.save_state(str(folder))
                        return seen
        return seen

    assert run(None, tmp_path) == every
    for stop in (2, len(train.epoch(0)), len(train.epoch(0)) + 3):
        folder = tmp_path / str(stop)
        assert run(stop, folder) + run(None, folder, folder) == every


def test_a_prepared_dataloader_of_accelerate_reads_epoch_after_epoch(kept: Store) -> None:
    """It reads one batch ahead, and calls `set_epoch` where there is one."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    train, asked = oracle(kept), DataLoaderConfiguration(dispatch_batches=False)
    with Loader(kept, config()) as loader:
        batches = Accelerator(cpu=True, dataloader_config=asked).prepare(DataLoader(BatchDataset(loader), batch_size=None))
        assert [[as_micro(batch) for batch in batches] for _ in range(3)] == [train.epoch(epoch) for epoch in range(3)]
