"""Options of other programs and of older versions, by command, each with the answer to a command line that has it."""

from __future__ import annotations

from bucketline.store.commands.place import FORMER_SHARD_SIZE

_TEMPLATE = "a --caption-template without {caption} is the trigger word"
_HELD_OUT = "--val-fraction 0.02:folder hashes the folder"
_FROM = "--captions-from takes a column's name or an extension with its dot"
_PARTS = "VAE, text encoders and tokenizers are those of --model"
_QUANTISED = "--encode-dtype int8 or nf4 quantises the text encoders"
_PRECISION = "--encode-dtype is the encoders' precision, --dtype that of what is stored"

_FORMER = {
    "trigger-word": _TEMPLATE,
    "keep-tokens": "--shuffle-tags N:KEEP keeps the first KEEP tags in place",
    "shuffle-seed": "--shuffle-tags N:KEEP:SEED has the seed",
    "split-by": _HELD_OUT,
    "caption-column": _FROM,
    "caption-extension": _FROM,
    "default-caption": f"it is `caption` under [source] of a data set file; for images that have none at all, {_TEMPLATE}",
    "split": "it is `dataset_splits` under [source] of a data set file",
    "max-prune": "it is --prune=N or --prune=FRACTION",
    "ray-address": "it is --engine ray:ADDRESS",
    "gpus-per-worker": "--workers 2:8@1gpu has it",
    "cpus-per-worker": "--workers 2:8@8cpu has it",
}
# of diffusers' scripts, kohya's sd-scripts, OneTrainer, ai-toolkit, SimpleTuner, img2dataset, webdataset
_OURS = {
    "--model": (
        *("pretrained-model-name-or-path", "pretrained-model", "model-name-or-path", "model-name", "model-path", "model-id"),
        *("base-model", "base-model-name", "name-or-path", "checkpoint", "ckpt", "ckpt-path"),
    ),
    "--grid, such as area:1024:64 or square:512": ("resolution", "size", "image-size", "img-size", "target-size", "sizes"),
    "--batch-size": ("vae-batch-size", "train-batch-size", "encode-batch-size", "text-encoder-batch-size", "batch"),
    "--device": ("gpu", "gpus", "gpu-id", "gpu-ids", "cuda", "devices", "accelerator", "use-cpu"),
    "--flip": ("random-flip", "flip-aug", "flip-x", "hflip", "horizontal-flip", "mirror"),
    "--crop center, which is the default": ("center-crop",),
    "--crop random": ("random-crop",),
    "--max-tokens": ("max-sequence-length", "max-token-length", "tokenizer-max-length"),
    "--captions-from": (
        *("caption-ext", "caption-file-extension", "caption-col", "caption-key", "caption-field", "text-column", "txt-key"),
        *("prompt-column",),
    ),
    "--caption-template, such as 'sks dog, {caption}'": ("caption-prefix", "caption-suffix", "prompt-template"),
    "--caption-template 'a photo of sks dog'": ("instance-prompt",),
    "--shuffle-tags 8": ("shuffle-caption", "shuffle-captions", "shuffle-tokens", "caption-shuffle"),
    "--min-size-px": ("min-size", "min-image-size", "min-resolution", "minimum-image-size"),
    "--val-fraction 0.02": (
        *("val-split", "val-ratio", "val-percent", "validation-split", "validation-fraction", "eval-split", "test-size"),
        *("holdout",),
    ),
    "--latents sample or --latents moments": ("sample-posterior", "sample-latents"),
    "--engine ray[:ADDRESS]": ("ray", "distributor"),
}
_IN_FILE = {
    "decode_threads": (
        *("num-workers", "dataloader-num-workers", "max-data-loader-n-workers", "num-threads", "threads", "thread-count"),
        *("processes-count", "cpu-threads"),
    ),
    'shard_size = "2GiB"': (
        *("shard-size-mib", "shard-size-mb", "max-shard-size", "maxsize", "maxcount", "samples-per-shard"),
        *("number-sample-per-shard",),
    ),
    "background": ("bg-color", "background-color"),
    "max_upscale = 1.0": ("bucket-no-upscale", "no-upscale"),
}
OF_FILE = {other: f"it is {ours}" for ours, others in _IN_FILE.items() for other in others}
"""The answers of a data set file, by the options of other programs without their hyphens."""
_STORE = "STORE is given without an option: `ingest pack SOURCE STORE --model MODEL`"
_ELSEWHERE = {
    "SOURCE is given without an option: `ingest pack SOURCE STORE --model MODEL`": (
        *("train-data-dir", "instance-data-dir", "data-dir", "data-root", "data-path", "dataset", "dataset-name"),
        *("dataset-path", "image-dir", "images-dir", "image-folder", "image-path", "images", "img-dir", "input", "input-dir"),
        *("input-folder", "input-path", "folder", "folder-path", "source", "src", "url-list", "in-json"),
    ),
    _STORE: (
        *("output", "output-dir", "output-folder", "output-path", "out", "out-dir", "out-folder", "dest", "store"),
        *("store-path", "save-dir", "save-path", "cache-path"),
    ),
    "a data set file is the SOURCE: `ingest pack data.toml STORE --model MODEL`": (
        *("config", "config-file", "data-config", "dataset-config", "data-backend-config", "multidatabackend-config"),
    ),
    _PARTS: (
        *("vae", "vae-path", "pretrained-vae", "pretrained-vae-model-name-or-path", "text-encoder", "text-encoder-path"),
        *("tokenizer", "tokenizer-name", "clip-l", "clip-g", "t5xxl"),
    ),
    "the model's own files tell its family": ("model-type", "model-arch", "arch", "architecture"),
    "the store is this cache: leave it out": (
        *("cache-latents", "cache-latents-to-disk", "cache-text-encoder-outputs", "cache-text-encoder-outputs-to-disk"),
        *("latent-caching", "vae-cache-ondisk"),
    ),
    "--grid area:1024:64 has buckets of all shapes from 1:4 to 4:1, of at most this area, sides in steps of 64": (
        *("enable-bucket", "bucket-reso-steps", "min-bucket-reso", "max-bucket-reso", "aspect-ratio-bucketing"),
        *("max-resolution", "num-buckets", "buckets", "bucket", "bucket-sizes", "aspect-ratio", "resolution-type"),
    ),
    "images are resized with Lanczos' filter to cover their bucket, and cropped by --crop": (
        *("resize", "resize-mode", "image-interpolation-mode", "resize-interpolation", "interpolation", "resample"),
    ),
    "--max-crop rejects images that lose too much to their bucket": ("max-aspect-ratio", "max-ratio"),
    _PRECISION: (
        *("mixed-precision", "precision", "vae-dtype", "weight-dtype", "torch-dtype", "save-dtype", "save-precision", "amp"),
        *("output-dtype", "train-dtype", "fp16", "bf16", "half", "full-fp16", "full-bf16", "no-half-vae", "latent-dtype"),
    ),
    _QUANTISED: ("quantize", "quantize-te", "qtype", "qtype-te", "load-in-8bit", "load-in-4bit"),
    "images are in the column that has their bytes; a table names their files in file_name": (
        *("image-column", "image-key", "image-col", "img-key", "url-col"),
    ),
    "captions are dropped in training: `bucketline train --caption-dropout 0.1`": (
        *("caption-dropout", "caption-dropout-rate", "caption-dropout-probability", "proportion-empty-prompts", "uncond-p"),
    ),
    "it is `repeats` of each [[source]] of a data set file, or in training --store photos.store:3": (
        *("repeats", "num-repeats", "dataset-repeats"),
    ),
    "the same command again packs only what is new or changed": (
        *("skip-existing", "incremental", "incremental-mode", "resume", "continue"),
    ),
    "a store is not replaced: name a new one": ("overwrite", "force", "overwrite-output-dir"),
    "a folder is searched with all below it": ("recursive", "subfolders"),
    "no seed is needed: a sample's id decides its crop, its split and its orders of tags": ("seed", "random-seed"),
    "a store has no order: the loader shuffles": ("shuffle",),
    "a store is written; `store export --format webdataset` writes other forms": ("output-format", "save-format"),
    "the token is read from HF_TOKEN, or what `hf auth login` has stored": (
        *("hub-token", "hf-token", "huggingface-token", "token", "use-auth-token"),
    ),
    "downloaded models are in the hub's cache, which HF_HOME moves": ("cache-dir", "model-cache-dir"),
    "several processes are started by `torchrun --nproc_per_node N -m bucketline.ingest pack …`": (
        *("nproc-per-node", "num-processes", "nnodes", "num-gpus", "multi-gpu", "num-machines", "world-size", "local-rank"),
    ),
}


def _answers(*lacking: str) -> dict[str, str]:
    """Return the answers of a command; `lacking`: the options of `ingest pack` that it does not have."""

    def here(ours: str) -> str:
        return f"`ingest pack` has {ours}" if ours.startswith(lacking) else f"here it is {ours}"

    found = {
        **_FORMER,
        **{other: here(ours) for ours, others in _OURS.items() for other in others},
        **{other: f"{answer}, in a data set file" for other, answer in OF_FILE.items()},
        **{other: answer for answer, others in _ELSEWHERE.items() for other in others if answer not in lacking},
    }
    return {f"--{other}": answer for other, answer in found.items()}


def _only(*begin: str) -> dict[str, str]:
    """Return those answers of `ingest pack` that begin so."""
    return {name: answer for name, answer in OF_PACK.items() if answer.removeprefix("here it is ").startswith(begin)}


OF_PACK = _answers()
OF_SCAN = _answers("--batch-size", "--device", "--engine", _STORE)
OF_PEEK = _answers("--batch-size", "--flip", "--max-tokens", "--val-fraction", "--latents", "--engine", _STORE)
OF_IMPORT = {
    **_only("--model", "--batch-size", "--device", "--max-tokens", "--val-fraction", _PARTS, _PRECISION, _QUANTISED),
    **dict.fromkeys(("--trigger-word", "--instance-prompt", "--caption-prefix", "--class-tokens"), "here it is --trigger"),
    "--split-by": _HELD_OUT,
    **FORMER_SHARD_SIZE,
}
OF_A_STORE = _only("--model", "--device", _PARTS)
"""The answers of `ingest prompts` and `ingest previews`."""
