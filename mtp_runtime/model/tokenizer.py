"""The byte-level BPE tokenizer of the tiny model, trained on the grammar's text, with a chat template and an EOS."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mtp_runtime.model.lexicon import TURN

VOCAB_SIZE = 1024
BOS, EOS, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, EOS, USER, ASSISTANT)
BOS_ID, EOS_ID = 0, 1

CHAT_TEMPLATE = (
    "{{ '" + BOS + "' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '" + ASSISTANT + "' + message['content'] + '" + EOS + "' }}"
    "{% else %}{{ '" + USER + "' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Train on whole books; special tokens get the first ids, all 256 bytes are in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((t.replace(TURN, " ") for t in texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode_book(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    """Token ids of a whole book as the model sees it: BOS, the chat turns where it is a chat, EOS."""
    if not chat:
        return [*tokenizer.encode(text).ids, EOS_ID]
    request, answer = text.split(TURN)
    turns = BOS + USER + request + ASSISTANT + answer + EOS
    return tokenizer.encode(turns, add_special_tokens=False).ids


def save(tokenizer: Tokenizer, folder: Path, max_len: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers and vLLM read."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
