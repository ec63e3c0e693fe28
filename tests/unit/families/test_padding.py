"""Padding after a caption changes no prediction, whatever its length: a batch is as long as the store's longest caption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bucketline.families.family import Padding
from bucketline.families.registry import family_of_pipeline
from bucketline.train.models.load import load
from tests.family_models import FORMS
from tests.unit.families.forms import batch_of_lengths, facts_for, predicted, write_form

LENGTHS = (5, 9, 2)
MOST = 7e-7  # of a prediction's largest value


def stores_own_tokens(form: str) -> bool:
    """Return whether a form's captions are stored without padding; those of others all have the same number of tokens."""
    family = family_of_pipeline(FORMS[form].pipeline)
    return family is not None and family.padding is Padding.VALID


@torch.no_grad()
@pytest.mark.parametrize("padded", [*filter(stores_own_tokens, FORMS)])  # `form` would mark most of them as slow
def test_predictions_do_not_depend_on_padding_beyond_a_caption(padded: str, tmp_path: Path) -> None:
    folder = write_form(tmp_path, padded)
    family, model = load(folder, facts_for(folder), 0)
    wanted = [
        predicted(family, model, batch_of_lengths(family, [length], length, first=row)) for row, length in enumerate(LENGTHS)
    ]
    for longest in (max(LENGTHS), 40):
        found = predicted(family, model, batch_of_lengths(family, LENGTHS, longest))
        error = (found - torch.cat(wanted)).abs().max() / torch.cat(wanted).abs().max()
        assert float(error) <= MOST, longest
