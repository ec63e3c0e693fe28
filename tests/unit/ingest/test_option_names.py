"""The answers to options that other programs have: ours, or a plain sentence, and for what is lacking no guess."""

from __future__ import annotations

import re

import pytest

from bucketline.errors import UsageError
from bucketline.help_screen import options_of
from bucketline.ingest.cli import COMMANDS
from bucketline.typed_line import read_line

GRID = "--grid area:1024:64 has buckets of all shapes"
SOURCE, STORE = (f"{one} is given without an option: `ingest pack SOURCE STORE --model MODEL`" for one in ("SOURCE", "STORE"))
DTYPES = "--encode-dtype is the encoders' precision, --dtype that of what is stored"
ANSWERS = {
    "--resolution": "here it is --grid, such as area:1024:64 or square:512",
    "--size": "here it is --grid",
    "--image_size": "here it is --grid",
    "--vae": "VAE, text encoders and tokenizers are those of --model",
    "--pretrained_model_name_or_path": "here it is --model",
    "--output_dir": STORE,
    "--output_folder": STORE,
    "--train_data_dir": SOURCE,
    "--dataset_name": SOURCE,
    "--caption_extension": "--captions-from takes a column's name or an extension with its dot",
    "--caption_column": "--captions-from takes a column's name",
    "--image_column": "images are in the column that has their bytes",
    "--bucket_reso_steps": GRID,
    "--min_bucket_reso": GRID,
    "--max_bucket_reso": GRID,
    "--enable_bucket": GRID,
    "--bucket_no_upscale": "it is max_upscale = 1.0, in a data set file",
    "--cache_latents": "the store is this cache: leave it out",
    "--cache_latents_to_disk": "the store is this cache: leave it out",
    "--center_crop": "here it is --crop center, which is the default",
    "--random_crop": "here it is --crop random",
    "--random_flip": "here it is --flip",
    "--flip_aug": "here it is --flip",
    "--resize_mode": "images are resized with Lanczos' filter",
    "--num_workers": "it is decode_threads, in a data set file",
    "--thread_count": "it is decode_threads, in a data set file",
    "--mixed_precision": DTYPES,
    "--no_half_vae": DTYPES,
    "--vae_batch_size": "here it is --batch-size",
    "--max_token_length": "here it is --max-tokens",
    "--gpu_ids": "here it is --device",
    "--min_image_size": "here it is --min-size-px",
    "--max_aspect_ratio": "--max-crop rejects images",
    "--maxcount": 'it is shard_size = "2GiB", in a data set file',
    "--number_sample_per_shard": 'it is shard_size = "2GiB", in a data set file',
    "--quantize": "--encode-dtype int8 or nf4 quantises the text encoders",
    "--shuffle_caption": "here it is --shuffle-tags 8",
    "--caption_prefix": "here it is --caption-template",
    "--num_repeats": "it is `repeats` of each [[source]]",
    "--caption_dropout_rate": "captions are dropped in training",
    "--skip_existing": "the same command again packs only what is new or changed",
    "--recursive": "a folder is searched with all below it",
    "--nproc_per_node": "several processes are started by `torchrun",
    "--hub_token": "the token is read from HF_TOKEN",
    "--batchsize": "did you mean '--batch-size'?",
}
LACKING = (
    *("--max_train_samples", "--limit", "--clip_skip", "--xformers", "--enable_vae_tiling", "--color_aug", "--revision"),
    *("--learning_rate", "--max_train_steps", "--timeout", "--verbose", "--compute_hash", "--gradient_checkpointing"),
)


def refusal(command: str, option: str) -> str:
    with pytest.raises(UsageError) as refused:
        read_line(COMMANDS[command], ["photos", "photos.store", "--model", "sd15", option, "1"])
    return str(refused.value)


@pytest.mark.parametrize("option", ANSWERS)
def test_a_word_of_another_program_is_answered_with_ours(option: str) -> None:
    assert f"there is no option {option.replace('_', '-')}; {ANSWERS[option]}" in refusal("pack", option)


@pytest.mark.parametrize("option", LACKING)
def test_what_packing_lacks_gets_no_guess(option: str) -> None:
    assert refusal("pack", option) == f"there is no option {option.replace('_', '-')} (`--help all` lists them)"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_that_answers_name_are_those_of_the_command(command: str) -> None:
    own = {word for one in options_of(COMMANDS[command]) for word in one.words}
    answers: dict[str, str] = getattr(COMMANDS[command], "ELSEWHERE", {})
    for name, answer in answers.items():
        if named := re.match(r"here it is (--[a-z-]+)", answer):
            assert named[1] in own, f"{command} {name}: {answer}"


def test_no_answer_is_for_an_option_that_packing_has() -> None:
    pack = COMMANDS["pack"]
    own = {word for one in options_of(pack) for word in one.words} | {
        f"--{one.field.replace('_', '-')}" for one in options_of(pack) if one.is_in_file
    }
    assert not own & {*getattr(pack, "ELSEWHERE")}  # noqa: B009 - a command need not have it
