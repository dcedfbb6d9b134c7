"""Compare llguidance and xgrammar: what they refuse, what is valid that they let through, time of a mask.

python scripts/grammar_engines.py [replies]    # pip install xgrammar first: nothing here needs it

The 20 schemas of tests/serve/test_grammar.py with the demo model's tokenizer (49,152 tokens). A reply is a
random walk over the tokens that an engine allows, every one as likely as another; those that end within 120
tokens are judged by jsonschema. One thread; compact JSON in both.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np

import hfaccel
from hfaccel.serve.grammar import Grammars, json_grammar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from serve.test_grammar import SCHEMAS  # noqa: E402

LONGEST = 120


class LLGuidance:
    def __init__(self, tokenizer):
        self.grammars = Grammars(tokenizer, len(tokenizer))

    def compiled(self, schema):
        grammar = json_grammar(schema)
        self.grammars.check(grammar)
        return grammar

    def walk(self, grammar):
        return self.grammars.constraint(grammar)._matcher

    def allowed(self, matcher):
        return np.frombuffer(matcher.compute_bitmask(), np.uint8)

    def take(self, matcher, token):
        assert matcher.consume_token(token)
        return matcher.is_stopped()


class XGrammar:
    def __init__(self, tokenizer):
        import xgrammar

        self.x = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.bits = xgrammar.allocate_token_bitmask(1, len(tokenizer))

    def compiled(self, schema):
        return self.compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(", ", ": ")
        )

    def walk(self, grammar):
        return self.x.GrammarMatcher(grammar)

    def allowed(self, matcher):
        matcher.fill_next_token_bitmask(self.bits)
        return self.bits.numpy().view(np.uint8)[0]

    def take(self, matcher, token):
        assert matcher.accept_token(token)
        return matcher.is_terminated()


def reply(engine, grammar, ends, draw, masks):
    """Tokens of a walk, or None for one that does not end."""
    matcher, out = engine.walk(grammar), []
    while len(out) < LONGEST:
        start = time.perf_counter()
        bits = engine.allowed(matcher)
        masks.append(time.perf_counter() - start)
        token = int(draw.choice(np.flatnonzero(np.unpackbits(bits, bitorder="little"))))
        if engine.take(matcher, token) or token in ends:
            return out + [token]
        out.append(token)
    return None


def main(replies: int) -> None:
    _, tokenizer = hfaccel.demo_model()
    ends = {tokenizer.eos_token_id}
    for kind in (LLGuidance, XGrammar):
        engine, draw = kind(tokenizer), random.Random(0)
        compile_s, masks, refused, wrong = [], [], [], {}
        ended = 0
        for name, schema in SCHEMAS.items():
            start = time.perf_counter()
            try:
                grammar = engine.compiled(schema)
            except Exception as why:
                refused.append(f"{name} ({str(why).splitlines()[0][:60]})")
                continue
            compile_s.append(time.perf_counter() - start)
            for _ in range(replies):
                if (tokens := reply(engine, grammar, ends, draw, masks)) is None:
                    continue
                ended += 1
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                try:
                    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
                except (ValueError, jsonschema.ValidationError):
                    wrong.setdefault(name, text)
        masks.sort()
        print(
            f"{kind.__name__}: compiling {statistics.median(compile_s) * 1e3:.2f} ms median, "
            f"{max(compile_s) * 1e3:.1f} worst; a mask {masks[len(masks) // 2] * 1e6:.0f} us median, "
            f"{masks[len(masks) * 99 // 100] * 1e6:.0f} p99, {masks[-1] * 1e6:.0f} worst of {len(masks)}"
        )
        print(f"  {ended} replies ended; schemas with an invalid one: {len(wrong)}; refused: {len(refused)}")
        for name, text in wrong.items():
            print(f"    {name}: {text[:90]!r}")
        for line in refused:
            print(f"    refused: {line}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
