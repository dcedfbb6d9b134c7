"""What chooses the next tokens of `sample`: over all logits, or over the few that can be chosen at all.

With a top-k among the processors, all but some dozen logits of a row are thrown away again. `Candidates` has
the executor find them where they are computed, runs transformers' own processors on [B, K] in place of
[B, vocab], and draws among K: `torch.multinomial` over a vocabulary of 49,152 takes a millisecond, a fifth of
a token. The distribution is the same; the tokens that a seed gives are not those it gives over all logits.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

MOST = 256  # candidates, beyond which all logits are as quick
SPARE = 14  # candidates beyond top-k: transformers keeps all logits that equal the last one

# Processors that see nothing but the scores of a row, and keep what they say about it when those that top-k
# has set to -inf are left out.
_PER_TOKEN = (processors.TemperatureLogitsWarper,)
_AFTER_TOP_K = (
    *_PER_TOKEN,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
)


def top_k_of(chain: LogitsProcessorList) -> int | None:
    """How many logits of a row can be chosen, if top-k comes before all that looks at more than one, else
    None."""
    top = None
    for processor in chain:
        kind = type(processor)
        if kind is processors.TopKLogitsWarper and processor.filter_value == -float("inf"):
            top = processor.top_k if top is None else min(top, processor.top_k)
        elif kind not in (_PER_TOKEN if top is None else _AFTER_TOP_K):
            return None
    return top if top is not None and top <= MOST else None


class Everything:
    """Chooses over all logits, kept as fp32 [B, vocab] as transformers does.

    Args:
        logits: [B, vocab] after the prompts. scores, raw: tuples that collect what each step saw, or None.
    """

    def __init__(self, rows, logits: torch.Tensor, chain, do_sample: bool, keep_scores: bool, keep_raw: bool):
        self.rows, self.chain, self.do_sample = rows, chain, do_sample
        self.scores = () if keep_scores else None
        self.raw = () if keep_raw else None
        self.logits = logits.to(copy=True, dtype=torch.float32)

    def choose(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The next token of every row, [B]; input_ids [B, length] is what the processors see."""
        scores = self.chain(input_ids, self.logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.raw is not None:
            self.raw += (self.logits,)
        if not self.do_sample:
            return torch.argmax(scores, dim=-1)
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    def advance(self, tokens: torch.Tensor, alive: list[int] | None) -> None:
        """Append the tokens; rows that are not alive (None: all are) keep the logits they have."""
        out = self.rows.step(tokens, alive)
        if alive is None:
            self.logits = out.to(copy=True, dtype=torch.float32, device=tokens.device)
        else:
            self.logits = self.logits.clone()
            self.logits[alive] = out.to(dtype=torch.float32, device=tokens.device)


class Candidates:
    """Samples over the `top` + SPARE largest logits of each row."""

    scores = raw = None

    def __init__(self, rows, logits: torch.Tensor, chain, top: int):
        self.rows, self.chain, self.top = rows, chain, top
        self.wanted = min(top + SPARE, logits.shape[1])
        self.logits, self.alive = logits, None
        self.values, self.ids = logits.float().topk(self.wanted, dim=-1)
        self.vocab = logits.shape[1]

    def choose(self, input_ids: torch.Tensor) -> torch.Tensor:
        """As `Everything.choose`."""
        values, ids = self.values, self.ids
        alive = slice(None) if self.alive is None else self.alive
        if self.wanted < self.vocab and (values[alive, self.top - 1] == values[alive, -1]).any():
            # More logits than were fetched are equal to the last one kept: all are looked at.
            values = self.values.new_zeros(len(input_ids), self.vocab)
            values[alive] = self.logits.float()
            ids = torch.arange(self.vocab).expand(len(input_ids), -1)
        for warp in self.chain:  # one by one: the list looks at each one's signature first
            values = warp(input_ids, values)
        probabilities = torch.softmax(values, dim=-1)
        return ids.gather(1, torch.multinomial(probabilities, 1)).squeeze(1)

    def advance(self, tokens: torch.Tensor, alive: list[int] | None) -> None:
        """As `Everything.advance`."""
        values, ids, self.logits = self.rows.candidates(tokens, alive, self.wanted)
        self.alive = alive
        if alive is None:
            self.values, self.ids = values, ids
        else:
            self.values[alive], self.ids[alive] = values, ids


def chooser(rows, logits: torch.Tensor, chain, config) -> Everything | Candidates:
    """What chooses tokens for this generation config, given the prompts' logits [B, vocab]."""
    detailed = config.return_dict_in_generate
    keep = (detailed and bool(config.output_scores), detailed and bool(config.output_logits))
    top = top_k_of(chain) if config.do_sample and not any(keep) else None
    if top is not None and rows.has_candidates and logits.device.type == "cpu":
        return Candidates(rows, logits, chain, top)
    return Everything(rows, logits, chain, config.do_sample, *keep)
