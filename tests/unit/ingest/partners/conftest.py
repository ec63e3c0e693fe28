"""A model that edits images, of small random encoders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def edit_model(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The encoders of `model` in a folder that names Flux.2 Klein's pipeline, which takes references as they are."""
    folder = tmp_path_factory.mktemp("edit model") / "klein"
    shutil.copytree(model, folder)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Flux2KleinPipeline"}), encoding="ascii")
    return folder
