"""Chroma's mask with gradient checkpointing, which diffusers leaves out of the single blocks."""

from __future__ import annotations

import torch

from bucketline.families.chroma import Chroma
from bucketline.families.family import StoreFacts
from bucketline.ingest.encoders.text_columns import Embedding
from tests.family_models import tiny_model
from tests.unit.families.oracle import batch_of


def test_gradient_checkpointing_keeps_the_mask_of_padding() -> None:
    torch.manual_seed(0)
    model = tiny_model("chroma").train()
    family = Chroma({}, StoreFacts(latent_channels=4, text={"tokens": 24}))
    noisy = torch.randn(2, 4, 8, 12)
    batch = batch_of([Embedding(tokens=torch.randn(n, 24)) for n in (4, 9)], 9, (16, 24), noisy)
    losses = []
    for step in (lambda: None, lambda: family.prepare(model), model.enable_gradient_checkpointing):
        step()
        loss = family.predict(model, noisy, torch.tensor([500.0, 300.0]), batch).square().mean()
        losses.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for other in losses[1:]:
        for one, two in zip(losses[0], other, strict=True):
            assert torch.equal(one, two)
