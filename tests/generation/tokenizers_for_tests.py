"""Small tokenizers for tests: bytes with control tokens, and SentencePiece's kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from pyengine.generation.text import byte_level_alphabet
from pyengine.generation.tokenizer import Tokenizer
from pyengine.generation.tokenizer_files import load_tokenizer

CONTROL = ["<s>", "</s>", "<pad>", "<u>", "<a>"]  # ids 256 .. 260 after the 256 bytes
BOS, EOS, PAD, USER, ASSISTANT = range(256, 261)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<u>{% else %}<a>{% endif %}"
    "{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def byte_backend(merges: list[tuple[str, str]] | None = None) -> Backend:
    """Ids 0-255 are the bytes, 256-260 control tokens, then one id a merge (given as text)."""
    letter = {byte: character for character, byte in byte_level_alphabet().items()}
    vocabulary = {letter[byte]: byte for byte in range(256)}
    pairs = [tuple("".join(letter[b] for b in part.encode()) for part in m) for m in merges or []]
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    if pairs:
        vocabulary |= {token: 256 + i for i, token in enumerate(CONTROL)}
        vocabulary |= {a + b: 261 + i for i, (a, b) in enumerate(pairs)}
        backend = Backend(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CONTROL)
    return backend


def spaced_backend(*, metaspace: bool) -> Backend:
    """SentencePiece's kind: U+2581 for spaces, <0x..> for bytes; control tokens are ids 0 and 1.

    Args:
        metaspace: spaces by Metaspace (as Llama), or by normalizer, Replace and Strip (as Phi-3).
    """
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    backend = Backend(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[("▁", "h"), ("▁h", "i")],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace("▁", "always")]
        )
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def add_bos(backend: Backend, token: str = "<s>") -> Backend:
    """The backend, beginning every text with a token."""
    backend.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], special_tokens=[(token, backend.token_to_id(token))]
    )
    return backend


def load(folder: Path, backend: Backend, **config: Any) -> Tokenizer:
    """Saves a Hugging Face directory's tokenizer files and loads them."""
    backend.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer
