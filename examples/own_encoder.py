"""Your own encoder's arrays, of a kind that no trainer of ours knows: spectrograms, masks, features and lists of beats.

    python examples/own_encoder.py sounds.store

It packs them, and reads them back in three ways: by the loader, by numpy, and by torch's `DataLoader`. Run it again, even after
`kill -9`: it continues behind the last commit. `record` and `encode` stand for your recordings and your model.
"""

import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.store import Column, RaggedGroup, RowColumn, Store, StoreWriter

MELS, FEATURES, RATE = 32, 8, 16_000
COLUMNS = [
    RowColumn(role="target", dtype="F16", shape=(MELS, "length")),  # rows of one length make a bucket, `train/50`
    RowColumn(role="mask", dtype="BOOL", shape=("length",), optional=True),  # which frames have speech, if that is known
    RowColumn(role="features/speaker", dtype="F8_E4M3", shape=(FEATURES,), encoder="speaker"),
]
# a list of another length in each recording, and none in some
RAGGED = {"beats": RaggedGroup(columns=[Column(name="at_s", dtype="F32", shape=())], optional=True)}


def record(number: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return a recording of half a second, or of one, `[samples]`."""
    samples = RATE // (1 + number % 2)
    tone: np.ndarray[tuple[int], np.dtype[np.float64]] = np.sin(np.arange(samples) * 0.05 * (1 + number % 7))
    return tone.astype(np.float32)


def encode(sound: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> dict[str, torch.Tensor]:
    """Return a recording's spectrogram `[MELS, length]` and a feature `[FEATURES]`, as a model would."""
    windows = torch.from_numpy(sound).unfold(0, 640, 320)  # [length, 640]
    power = torch.fft.rfft(windows).abs()[:, 1:]  # [length, 320]
    mels = power.view(len(power), MELS, -1).mean(dim=2).log1p().T  # [MELS, length]
    feature = mels.mean(dim=1).view(FEATURES, -1).mean(dim=1)
    return {"target": mels.half(), "features/speaker": feature.to(torch.float8_e4m3fn)}


def pack(path: str) -> int:
    """Write 48 recordings that the store does not have yet; return how many it has then."""
    encoders = {"speaker": {"name": "mine", "version": 3}}
    with StoreWriter(path, columns=COLUMNS, encoders=encoders, ragged=RAGGED) as writer:
        for number in range(48):
            sample_id = f"sounds/{number:03d}.wav"
            if sample_id in writer:
                continue
            sound = record(number)
            columns = encode(sound)
            if number % 3:
                columns["mask"] = columns["target"].mean(dim=0) > 1
            beats = np.arange(number % 5, dtype=np.float32) / 8  # [T], 0 to 4 of them
            split = "val" if number % 8 == 0 else "train"
            writer.add(sample_id, split, columns, ragged={"beats": beats} if number % 4 else {})
            if number % 16 == 15:
                writer.commit()  # these rows survive a crash from here on
    return writer.manifest.samples


def read_by_the_loader(path: str) -> int:
    """Shuffled batches of one shape each, prefetched: for training."""
    num_rows = 0
    columns = ("target", "mask", "features/speaker")
    config = LoaderConfig(batch_size=4, epochs=1, remainder=Remainder.PARTIAL, columns=columns, ragged=("beats",))
    with Loader(path, config) as loader:
        for batch in loader:
            mels, speaker = batch.columns["target"], batch.columns["features/speaker"]  # [B, MELS, length], [B, FEATURES]
            mask = batch.columns["mask"] | ~batch.present["mask"][:, None]  # [B, length]; all of a row that has no mask
            assert mels.shape[2] == mask.shape[1]
            assert speaker.dtype == torch.float8_e4m3fn
            beats = batch.ragged["beats"]  # beats.columns["at_s"] is [B, L], with zeros after a row's own beats
            assert beats.columns["at_s"].shape == beats.mask.shape
            assert int(beats.mask.sum()) == int(beats.lengths.sum())
            num_rows += int(batch.weight.sum())
    return num_rows


def read_by_numpy(path: str) -> int:
    """Any rows of any column, in any order, without torch."""
    num_rows = 0
    store = Store.open(path)
    for bucket in store.buckets("train"):
        rows = np.arange(bucket.num_rows)
        mels = bucket.read(rows, "latent", verify=True)  # [rows, MELS, length]; the target's name in a block is `latent`
        assert mels.shape[2] == bucket.axes["length"]
        num_rows += len(bucket.sample_ids(rows))
    return num_rows


class Sounds(Dataset[torch.Tensor]):
    """One row at a time, for code that expects a map-style data set and batches by itself."""

    def __init__(self, path: str, bucket: str) -> None:
        self._bucket = Store.open(path, plain_reads=True).bucket(bucket)

    def __len__(self) -> int:
        return self._bucket.num_rows

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self._bucket.read(np.array([row]), "latent")[0])


def read_by_torch(path: str) -> int:
    """Batches of torch's own `DataLoader`, bucket by bucket."""
    names = [bucket.name for bucket in Store.open(path).buckets("train")]
    return sum(len(batch) for name in names for batch in DataLoader(Sounds(path, name), batch_size=4, shuffle=True))


def main(path: str) -> None:
    """Pack, read three times, and say how many rows there were."""
    print(f"{pack(path)} recordings packed")
    found = read_by_the_loader(path), read_by_numpy(path), read_by_torch(path)
    print(f"{found[0]} read by the loader, {found[1]} by numpy, {found[2]} by torch's DataLoader")


if __name__ == "__main__":
    main(sys.argv[1])
