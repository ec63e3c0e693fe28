"""Chats that pipelines put captions into, and what they tokenize them with."""

from __future__ import annotations

from typing import Any

from bucketline.families.family import StandIn

# Qwen-Image 2.1's pipeline counts the tokens of the system's turn even if it encodes no captions.
NO_PROCESSOR = StandIn(apply_chat_template=lambda *_, **__: [[]], tokenizer=StandIn(encode=lambda _: [0]))


def user_turn(tokenizer: Any, caption: str, *, thinks: bool) -> str:  # noqa: ANN401 - transformers has no types
    """Return a chat in which a caption is the user's only message, up to where the answer begins."""
    chat = [{"role": "user", "content": caption}]
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinks}
    return str(tokenizer.apply_chat_template(chat, **options))
