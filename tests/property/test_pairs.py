"""Pairs stay pairs: random sources are packed, edited, packed again and loaded, and every row is held against an oracle.

Each image is a smooth pattern that no other has, so its latent tells which image it is of, and whether it is mirrored. The
oracle has the images in memory. It resizes them by Pillow, encodes them by diffusers' own VAE and pipeline, and never asks the
store what belongs together. `python -m tests.property.test_pairs 1000` does a thousand runs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from bucketline.families.registry import family_named
from bucketline.loader import Batch, Loader, LoaderConfig, WeightedStore
from bucketline.store import Store
from bucketline.store.format.block import sample_digest
from tests.commands import call
from tests.family_models import open_pipeline, write_pipeline
from tests.models import encoded

FAMILIES = {"flux2 klein": "flux2_klein", "flux_kontext": "flux_kontext", "qwenimage_edit_plus": "qwenimage_edit_plus"}
WORDS = ("a red cat", "the blue dog", "make it night", "add a boat of the house", "green")
SIZES = ((40, 60), (60, 40), (48, 48), (33, 70))  # of files, px, height first
NUM_TOKENS = 32  # of captions whose encoder sees no images
AREA_PX = 32  # the side of a reference of its own size
# What two ways to resize may differ by in the mean: of latents that reach 1 to 4, of masks, and of tokens of their mean size,
# which change by twice of it with another image.
NEAR, NEAR_MASK, NEAR_TOKENS = 0.08, 0.06, 0.005


def pattern(height: int, width: int, seed: int) -> Image.Image:
    """Return waves that differ from side to side and from seed to seed."""
    draw = np.random.default_rng(seed)
    down, across = np.mgrid[0:height, 0:width].astype(float)
    down, across = down / height, across / width
    each = [
        np.sin(draw.uniform(2, 7) * down + draw.uniform(2, 7) * across + draw.uniform(0, 6)) + draw.uniform(-1, 1) * across
        for _ in range(3)
    ]
    values = np.stack(each, axis=-1)
    return Image.fromarray((127.5 + 120 * values / np.abs(values).max()).astype(np.uint8))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A sample as the user has it: images by name, `target`, `0`, `1`, …, `mask`; and captions."""

    id: str
    images: dict[str, Image.Image]
    captions: tuple[str, ...]

    @property
    def references(self) -> list[Image.Image]:
        return [self.images[name] for name in sorted(self.images) if name.isdecimal()]


@dataclass(kw_only=True)
class World:
    """A user's folders, and what is known of them."""

    folder: Path
    draw: random.Random
    family: str
    num_folders: int
    has_masks: bool
    flip: bool
    crop: str
    pairs: dict[bytes, Pair] = field(default_factory=dict)
    alone: dict[bytes, Pair] = field(default_factory=dict)  # of another store

    def write(self, pair: Pair) -> None:
        self.pairs[sample_digest(pair.id)] = pair
        stem = Path(pair.id).stem
        for name, image in pair.images.items():
            place = self.folder / name / (pair.id if name == "target" else f"{stem}.{'webp' if name == '1' else 'png'}")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(encoded(image, "WEBP", lossless=True) if name == "1" else encoded(image, "PNG"))
        (self.folder / "target" / f"{stem}.txt").write_text("".join(f"{one}\n" for one in pair.captions), encoding="utf-8")

    def remove(self, pair: Pair, name: str) -> Pair:
        for path in (self.folder / name).glob(f"{Path(pair.id).stem}.*"):
            path.unlink()
        return replace(pair, images={own: image for own, image in pair.images.items() if own != name})

    def write_alone(self) -> None:
        """Write some images without partners, for a store of their own beside that of the pairs."""
        (self.folder / "alone").mkdir()
        for n in range(self.draw.randint(1, 3)):
            pair = Pair(id=f"alone {n}.png", images={"target": self.new_image()}, captions=(self.draw.choice(WORDS),))
            self.alone[sample_digest(pair.id)] = pair
            (self.folder / "alone" / pair.id).write_bytes(encoded(pair.images["target"], "PNG"))
            (self.folder / "alone" / pair.id).with_suffix(".txt").write_text(pair.captions[0], encoding="utf-8")
        lines = ["[source]", 'path = "alone"', *(['mask = "whole"'] if self.has_masks else [])]
        lines += ["references_optional = true"] if self.family == "qwenimage_edit_plus" else []
        (self.folder / "alone.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def new_image(self, like: tuple[int, int] | None = None) -> Image.Image:
        return pattern(*(like or self.draw.choice(SIZES)), self.draw.getrandbits(30))

    def new_pair(self, number: int) -> Pair:
        target = self.new_image()
        size = target.size[::-1]
        images = {"target": target}
        for n in range(self.num_folders):
            if self.draw.random() < 0.75 or number == 0:  # a folder without any image is refused
                images[str(n)] = self.new_image(size if self.draw.random() < 0.5 else None)
        if self.has_masks:
            images["mask"] = self.new_image(size).convert("L")
        captions = tuple(self.draw.sample(WORDS, self.draw.randint(0, 3)))
        return Pair(id=f"{number:02d}.png", images=images, captions=captions)

    def edit(self) -> None:
        """Change a few samples as users do: another image, one less, one more, two exchanged, other captions."""
        for pair in self.draw.sample(list(self.pairs.values()), min(3, len(self.pairs))):
            self.write(self._edited(pair))
        others = [pair for pair in self.pairs.values() if "0" in pair.images]
        if len(others) > 1 and self.draw.random() < 0.5:  # whose files exchange their names, and keep their times
            one, other = self.draw.sample(others, 2)
            paths = [self.folder / "0" / f"{Path(pair.id).stem}.png" for pair in (one, other)]
            paths[0].rename(aside := self.folder / "aside.png")
            paths[1].rename(paths[0])
            aside.rename(paths[1])
            self.pairs[sample_digest(one.id)] = replace(one, images={**one.images, "0": other.images["0"]})
            self.pairs[sample_digest(other.id)] = replace(other, images={**other.images, "0": one.images["0"]})

    def _edited(self, pair: Pair) -> Pair:
        absent = [str(n) for n in range(self.num_folders) if str(n) not in pair.images]
        name = self.draw.choice([*pair.images, *absent, "caption"])
        if name == "caption":
            return replace(pair, captions=tuple(self.draw.sample(WORDS, self.draw.randint(0, 3))))
        if name in absent:
            return replace(pair, images={**pair.images, name: self.new_image()})
        if name.isdecimal() and self.draw.random() < 0.4 and pair.id != "00.png":
            return self.remove(pair, name)
        image = pair.images[name]  # of the same size, so that masks fit and pairs stay aligned
        return replace(pair, images={**pair.images, name: self.new_image(image.size[::-1]).convert(image.mode)})

    def data_file(self) -> Path:
        lines = ["[source]", 'path = "target"', f"references_area = {AREA_PX}"]
        if self.num_folders:
            lines += [f"references = {json.dumps([str(n) for n in range(self.num_folders)])}", "references_optional = true"]
        if self.has_masks:
            lines.append('mask = "mask"')
        path = self.folder / "pairs.toml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


# ------------------------------------------------------------------------------------------------------------------ the oracle


@cache
def model_of(family: str) -> Path:
    return write_pipeline(Path(tempfile.mkdtemp(prefix="pairs-")) / family.replace(" ", "-"), family)


@cache
def pipeline_of(family: str) -> Any:
    return open_pipeline(model_of(family), family)


@cache
@torch.no_grad()
def caption_of(family: str, text: str) -> torch.Tensor:
    """Return the states of a caption whose encoder sees no images, [L, D]."""
    more: dict[str, Any] = {"prompt_2": None} if "kontext" in family else {}
    return torch.as_tensor(pipeline_of(family).encode_prompt(prompt=text, max_sequence_length=NUM_TOKENS, **more)[0][0])


class Oracle:
    """What the rows of a sample must be."""

    def __init__(self, world: World, pair: Pair, record: Any) -> None:
        self._world, self._pair, self._record = world, pair, record
        self._pipeline = pipeline_of(world.family)
        self._target_px = pair.images["target"].size

    def _placed(self, image: Image.Image) -> Image.Image:
        """Return an image as its target is placed: a crop of the size in the record, where the record says."""
        (height, width), (top, left, rows, columns) = self._record.resized, self._record.crop
        resized = image.resize((width, height), Image.Resampling.LANCZOS)
        return resized.crop((left, top, left + columns, top + rows))

    def _fitted(self, image: Image.Image) -> Image.Image:
        if image.size == self._target_px:
            return self._placed(image)
        family = family_named(FAMILIES[self._world.family])
        assert family is not None
        assert family.references is not None
        return family.references.fitted(image, AREA_PX**2)

    @torch.no_grad()
    def latent(self, image: Image.Image, *, mirrored: bool) -> NDArray[Any]:
        pixels = np.asarray(image.convert("RGB"))[:, :: -1 if mirrored else 1].copy()
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1
        vae = self._pipeline.vae
        is_video = "Qwen" in type(vae).__name__
        found = vae.encode(tensor[:, :, None] if is_video else tensor).latent_dist.mode()
        latent: NDArray[Any] = (found[:, :, 0] if is_video else found)[0].numpy()
        return latent

    def target(self, *, mirrored: bool) -> NDArray[Any]:
        return self.latent(self._placed(self._pair.images["target"]), mirrored=mirrored)

    def references(self, *, mirrored: bool) -> list[NDArray[Any]]:
        return [self.latent(self._fitted(one), mirrored=mirrored) for one in self._pair.references]

    def mask(self, shape: tuple[int, ...], *, mirrored: bool) -> NDArray[Any]:
        if "mask" not in self._pair.images:
            return np.ones(shape)
        placed = self._placed(self._pair.images["mask"])
        small = placed.resize((shape[1], shape[0]), Image.Resampling.BOX)
        return np.asarray(small)[:, :: -1 if mirrored else 1] / 255

    @torch.no_grad()
    def tokens(self, text: str) -> torch.Tensor:
        """Return the pipeline's own states of a caption with the sample's images, [L, D]."""
        if self._world.family != "qwenimage_edit_plus":
            return caption_of(self._world.family, text)
        family = family_named("qwenimage_edit_plus")
        assert family is not None
        assert family.references is not None
        seen = []
        for image in self._pair.references:
            original = self._placed(image) if image.size == self._target_px else image
            seen.append(family.references.for_text(original, self._fitted(image)))
        states, mask = self._pipeline.encode_prompt(prompt=[text], image=seen or None)
        own: torch.Tensor = states[0] if mask is None else states[0][mask[0].bool()]
        return own


def expect_row(world: World, stores: list[WeightedStore], batch: Batch, n: int, *, drops: bool) -> str:
    """Compare a row of a batch with what its sample must be; return its kind."""
    digest = batch.ids[n].numpy().tobytes()
    pair = (world.pairs | world.alone)[digest]
    found = stores[digest in world.alone].store.find_digest(digest)
    assert found is not None
    oracle, mirrored = Oracle(world, pair, found[1]), bool(batch.flipped[n])
    assert np.abs(batch.latents[n].float().numpy() - oracle.target(mirrored=mirrored)).mean() < NEAR
    wanted = oracle.references(mirrored=mirrored)
    assert [tuple(one.shape[1:]) for one in batch.references] == [one.shape for one in wanted]
    for own, expected in zip(batch.references, wanted, strict=True):
        assert np.abs(own[n].float().numpy() - expected).mean() < NEAR, pair.id
    if world.has_masks:
        assert batch.mask is not None
        mask = batch.mask[n].numpy()
        assert np.abs(mask - oracle.mask(mask.shape, mirrored=mirrored)).mean() < NEAR_MASK
    tokens = batch.tokens[n][batch.token_mask[n]].float()
    texts = [*(pair.captions or ("",)), *([""] if drops else [])]
    meant = (oracle.tokens(text).float() for text in texts)
    assert any(tokens.shape == one.shape and (tokens - one).abs().mean() < NEAR_TOKENS * one.abs().mean() for one in meant)
    return f"{len(wanted)} references" + ", mirrored" * mirrored


# ----------------------------------------------------------------------------------------------------------------------- a run


def one_run(seed: int, folder: Path) -> Counter[str]:
    """Do a run; return how often each kind of row was compared."""
    draw = random.Random(seed)
    family = draw.choice(list(FAMILIES))
    sees = family == "qwenimage_edit_plus"
    world = World(
        folder=folder,
        draw=draw,
        family=family,
        num_folders=draw.choice([1] if "kontext" in family else [1, 2, 3]),
        has_masks=draw.random() < 0.5,
        flip=not sees and draw.random() < 0.5,
        crop=draw.choice(["center", "random"]),
    )
    for n in range(draw.randint(3, 6)):
        world.write(world.new_pair(n))
    seen: Counter[str] = Counter()
    if draw.random() < 0.4:
        world.write_alone()
        pack(world, folder / "alone.toml", "alone.store")
    for number in range(draw.randint(1, 3)):
        if number:
            world.edit()
        pack(world, world.data_file(), "pairs.store")
        seen += loaded(world, draw)
    return seen


def pack(world: World, source: Path, name: str) -> None:
    """Pack a source; a store keeps the rules of its first pack."""
    rules: list[object] = ["--grid", "32x48,48x32,32x32", "--min-size-px", 8, "--max-crop", 1, "--crop", world.crop]
    rules += [] if world.family == "qwenimage_edit_plus" else ["--max-tokens", NUM_TOKENS]
    rules += ["--flip"] if world.flip else []
    more = ["--batch-size", 2, *(["--check", "content"] if world.draw.random() < 0.3 else [])]
    store = world.folder / name
    asked = more if store.exists() else rules + more
    call("ingest", "pack", source, store, "--model", model_of(world.family), "--json", *asked).done()


def loaded(world: World, draw: random.Random) -> Counter[str]:
    """Load an epoch by one or two ranks, resumed in the middle, in a mixture or alone; compare every row."""
    store = Store.open(world.folder / "pairs.store")
    assert sum(bucket.num_rows for bucket in store.buckets()) == len(world.pairs)
    stores = [WeightedStore(store, repeats=draw.choice([1, 2]))]
    stores += [WeightedStore(Store.open(world.folder / "alone.store"))] if world.alone else []
    dropout = draw.choice([0.0, 0.5])
    config = LoaderConfig(
        batch_size=draw.choice([1, 2, 3]),
        seed=draw.getrandbits(40),
        epochs=2,
        remainder="partial",
        caption_dropout=dropout,
        flip=0.5 if world.flip else 0.0,
        verify=draw.random() < 0.3,
        window=draw.choice([None, 16]),
    )
    world_size, seen, rows = draw.choice([1, 2]), Counter[str](), Counter[bytes]()
    for rank in range(world_size):
        with Loader(stores, config, rank=rank, world_size=world_size) as loader:
            whole = [key_of(batch) for batch in loader.forever()]
        stop, resumed = draw.randint(0, len(whole)), list[tuple[Any, ...]]()
        with Loader(stores, config, rank=rank, world_size=world_size) as loader:
            resumed.extend(map(key_of, islice(loader.forever(), stop)))
            state = json.loads(json.dumps(loader.state_dict()))
        with Loader(stores, config, rank=rank, world_size=world_size) as loader:
            loader.load_state_dict(state)
            for batch in loader.forever():
                resumed.append(key_of(batch))
                for n in np.flatnonzero(batch.weight.numpy() > 0).tolist():
                    if batch.epoch == 1:  # the second one
                        seen[expect_row(world, stores, batch, n, drops=dropout > 0)] += 1
        assert resumed == whole
        for _, ids, weight, *_ in whole:
            rows.update(one for one, own in zip(ids, weight, strict=True) if own)
    assert rows == dict.fromkeys(world.pairs, 2 * stores[0].repeats) | dict.fromkeys(world.alone, 2)
    return seen


def key_of(batch: Batch) -> tuple[Any, ...]:
    ids = tuple(row.tobytes() for row in batch.ids.numpy())
    tensors = [batch.latents, *batch.references, batch.tokens, *([] if batch.mask is None else [batch.mask])]
    return batch.bucket, ids, tuple(batch.weight.tolist()), [one.float().sum(dtype=torch.float64).item() for one in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_rows_are_their_pairs(seed: int, tmp_path: Path) -> None:
    assert sum(one_run(seed, tmp_path).values()) > 0


def main(count: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                total += one_run(seed, Path(folder))
            except BaseException:
                print(f"run {seed} failed")
                raise
    print(f"{count} runs, {sum(total.values())} rows compared: {dict(sorted(total.items()))}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
