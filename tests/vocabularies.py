"""Tokenizers small enough for `tiny` models: byte-level BPE, and BPE as SentencePiece has it."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
WORDS = "the then there this that with other are era 2026 12 hello world café über".split()


def byte_level(pattern=None, *, bos: bool = False, template=TEMPLATE):
    """Every byte, some merges, a user's own token; `pattern` is a pre-tokenizer before the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = SPECIAL + alphabet, []
    step = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for word in WORDS:
        (piece, _), *_ = step.pre_tokenize_str(" " + word)
        left = piece[0]
        for right in piece[1:4]:
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append((left, right))
            left += right
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = step if pattern is None else pre_tokenizers.Sequence([pattern, step])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken("<user>", normalized=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return _wrapped(backend, template)


def sentence_piece(*, prefix: bool = True, template=TEMPLATE):
    """Characters, bytes as a fallback, merges in order of their scores."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    merges = []
    for word in WORDS:
        left = "▁"
        for right in word[:4]:
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append((left, right))
            left += right
    tokens += sorted({c for word in WORDS for c in word} | {"▁"} - set(tokens))
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _wrapped(backend, template, unk_token="<unk>")


def _wrapped(backend, template, **more):
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template, **more
    )
