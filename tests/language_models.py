"""Tiny language models of the real classes, a few thousand random weights each, and their tokenizers with chat templates."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

WORDS = ("a", "red", "green", "blue", "cat", "dog", "house", "of", "the")
QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_THINKING = ("<think>", "</think>")  # one token each, and not special
MISTRAL_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]")
# Words of the pipelines' own prompts are one token each, as in the published tokenizers: pipelines drop a fixed number of them.
_PROMPTS = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:\nuser\nassistant\nComprehend and analyze the provided prompt.\n\n"
)
_EDIT_PROMPTS = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how the "
    "user's text instruction should alter or modify the image. Generate a new image that meets the user's requirements while "
    "maintaining consistency with the original input where appropriate."
)
_CONTENT = (
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n" + _CONTENT + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "<s>{% for message in messages %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]" + _CONTENT + "[/SYSTEM_PROMPT]"
    "{% else %}[INST]" + _CONTENT + "[/INST]{% endif %}{% endfor %}"
)
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.5,  # large enough that masks and positions show in the outputs
    "bos_token_id": None,
    "eos_token_id": None,
}
_SIGHT: dict[str, Any] = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16}


@functools.cache
def _merges(*more: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a byte-level vocabulary, and the merges that make a token of each word in `WORDS`, `_PROMPTS` and `more`."""
    import tokenizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), behavior="isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, to_bytes])
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([_PROMPTS, " ".join(WORDS), *more], trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [(first, second) for first, second in model["merges"]]


def qwen_tokenizer(*, edits: bool = False) -> Any:
    """Make a Qwen tokenizer: byte-level, so that any text has tokens, with the template of Qwen's chats.

    If `edits`, with the words of Qwen-Image-Edit's prompt, whose pipelines drop 64 tokens.
    """
    import transformers

    vocabulary, merges = _merges(*(_EDIT_PROMPTS, "Picture") * edits)
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=dict(vocabulary), merges=list(merges), additional_special_tokens=list(QWEN_SPECIAL), model_max_length=4096
    )
    tokenizer.add_tokens(list(QWEN_THINKING))
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


def mistral_tokenizer(*, begins: bool = False) -> Any:
    """Make a byte-level tokenizer with the template of Mistral's chats, which pads on the left.

    If `begins`, it puts the first special token before each text and pads on the right, as Llama's and ERNIE-Image's do.
    """
    import tokenizers
    import transformers

    vocabulary, merges = _merges()
    special = {token: len(vocabulary) + n for n, token in enumerate(MISTRAL_SPECIAL)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={**vocabulary, **special}, merges=list(merges)))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if begins:
        backend.post_processor = _beginning("<s>", special["<s>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(MISTRAL_SPECIAL),
        padding_side="right" if begins else "left",
        model_max_length=4096,
    )
    tokenizer.chat_template = MISTRAL_TEMPLATE
    return tokenizer


def gemma_tokenizer(max_length: int) -> Any:
    """Make a Gemma tokenizer: letters, words, and a token for each byte of other text. It pads on the right, unless asked."""
    import transformers

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *(chr(code) for code in range(ord("a"), ord("z") + 1))]
    merges = [(word[:n], word[n]) for word in WORDS for n in range(1, len(word))]
    pieces += dict.fromkeys(first + second for first, second in merges)
    tokenizer = transformers.GemmaTokenizerFast(
        vocab={piece: n for n, piece in enumerate(pieces)}, merges=merges, model_max_length=max_length, padding_side="right"
    )
    tokenizer.backend_tokenizer.post_processor = _beginning("<bos>", pieces.index("<bos>"))
    return tokenizer


def _beginning(token: str, number: int) -> Any:
    import tokenizers

    return tokenizers.processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, number)]
    )


def qwen25_vl(*, edits: bool = False) -> Any:
    import transformers

    tokenizer = qwen_tokenizer(edits=edits)
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_SIZES, "vocab_size": len(tokenizer), "rope_parameters": QWEN_ROPE},
        vision_config={**_SIGHT, "fullatt_block_indexes": [0]},
        **_vision_tokens(tokenizer),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3(num_layers: int = 2) -> Any:
    import transformers

    sizes = {**_SIZES, "num_hidden_layers": num_layers, "vocab_size": len(qwen_tokenizer())}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))


def qwen3_vl(kind: str = "Qwen3VLForConditionalGeneration", num_layers: int = 2, num_heads: int = 2) -> Any:
    import transformers

    config = transformers.Qwen3VLConfig(
        text_config={
            **_SIZES,
            "num_attention_heads": num_heads,
            "num_hidden_layers": num_layers,
            "vocab_size": len(qwen_tokenizer()),
            "rope_parameters": {**QWEN_ROPE, "mrope_interleaved": True},
        },
        vision_config={**_SIGHT, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **_vision_tokens(qwen_tokenizer()),
    )
    return getattr(transformers, kind)(config)


def mistral3(num_layers: int = 2, kind: str = "Mistral3ForConditionalGeneration") -> Any:
    import transformers

    sight = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    sizes = {**_SIZES, "num_hidden_layers": num_layers, "vocab_size": len(mistral_tokenizer())}
    config = transformers.Mistral3Config(
        text_config={**sizes, "model_type": "mistral"},
        vision_config={**sight, "model_type": "pixtral", "image_size": 28, "patch_size": 14},
        image_token_index=mistral_tokenizer().convert_tokens_to_ids("[IMG]"),
    )
    return getattr(transformers, kind)(config)


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(**_SIZES, vocab_size=len(mistral_tokenizer()), attn_implementation="eager")
    return transformers.LlamaForCausalLM(config)


def gemma2() -> Any:
    import transformers

    return transformers.Gemma2Model(transformers.Gemma2Config(**_gemma_sizes()))


def t5gemma() -> Any:
    import transformers
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    return T5GemmaEncoder(transformers.T5GemmaModuleConfig(**_gemma_sizes(), dropout_rate=0.0))


def publish_t5gemma(pipeline: Path) -> None:
    """Write the index and the encoder's configuration as published: the class by its name in PRX's room, and with a decoder."""
    import transformers

    sizes = transformers.T5GemmaModuleConfig(**_gemma_sizes()).to_dict()
    config = transformers.T5GemmaConfig(encoder=dict(sizes), decoder=dict(sizes), architectures=["T5GemmaEncoder"])
    config.save_pretrained(pipeline / "text_encoder")
    index = pipeline / "model_index.json"
    named = {**json.loads(index.read_text(encoding="utf-8")), "text_encoder": ["prx", "T5GemmaEncoder"]}
    index.write_text(json.dumps(named), encoding="utf-8")


def _gemma_sizes() -> dict[str, Any]:
    special = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return {**_SIZES, **special, "query_pre_attn_scalar": 8, "vocab_size": len(gemma_tokenizer(1))}


def qwen3_vl_processor() -> Any:
    """Make a Qwen3-VL processor, as published but for its limit of pixels."""
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return _processor("Qwen3VLProcessor", qwen_tokenizer(), patch_size=16, min_pixels=32 * 32, max_pixels=1 << 20, **normal)


def qwen_edit_processor() -> Any:
    """Make the Qwen2.5-VL processor of Qwen-Image-Edit."""
    return _processor("Qwen2VLProcessor", qwen_tokenizer(edits=True), patch_size=14, min_pixels=3136, max_pixels=12845056)


def _processor(kind: str, tokenizer: Any, **pixels: Any) -> Any:
    """Make a processor of text and images; for videos it needs torchvision."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.processing_utils import ProcessorMixin

    base: Any = getattr(transformers, kind)

    class WithoutVideos(base):  # type: ignore[misc] # transformers has no types
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
            for name in ("image", "video"):
                setattr(self, f"{name}_token", f"<|{name}_pad|>")
                setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))

    WithoutVideos.__name__, WithoutVideos.__module__ = base.__name__, base.__module__  # in a pipeline's index
    return WithoutVideos(Qwen2VLImageProcessorPil(**pixels), tokenizer, QWEN_TEMPLATE)


def _vision_tokens(tokenizer: Any) -> dict[str, int]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {field: tokenizer.convert_tokens_to_ids(token) for field, token in names.items()}
