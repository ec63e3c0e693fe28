"""The bytes that the benchmarks' page and the docs name for a sample with references."""

from __future__ import annotations

from bucketline.bench.seen_bytes import bytes_a_sample


def test_a_sample_of_three_references_and_eight_captions_has_its_images_states_once() -> None:
    found = bytes_a_sample(3, 8)
    latents, images, caption, chat = 4 * 16 * 128 * 128 * 2, 3 * (196 + 7) * 3584 * 2, 105 * 3584 * 2, 5 * 3584 * 2
    expected = {"shared": latents + images + chat + 8 * caption, "by caption": latents + images + chat + 8 * (images + caption)}
    for name, own in expected.items():
        assert own <= found[name] < 1.02 * own, name
    assert found["shared"] < 0.27 * found["by caption"]
