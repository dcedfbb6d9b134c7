"""Greedy decoding and sampling over the runner: what transformers' `_sample` does, without padding.

Each row is a sequence of its own real tokens: masked slots are never computed, so padding on either side
cannot change a row. Processors, stopping criteria, streamers and the random generator see what they see in
transformers' loop: ids [B, length] with the padding, fp32 scores [B, vocab], one draw per step for all rows.
One exception: where top-k stands before all that looks at more than one logit, processors see the
candidates alone and the draw is over them (`sampling.py`). Rows that have ended are not computed any more,
unless their scores, logits or cache are to be returned.
"""

from __future__ import annotations

import time
from dataclasses import fields

import torch
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from hfaccel.cache.paged import PagedCache
from hfaccel.cache.pool import Sequence
from hfaccel.errors import PatchError
from hfaccel.generate.checks import left_padding
from hfaccel.generate.sampling import chooser
from hfaccel.runtime.runner import Runner

CLAIM_TOKENS = 2048  # new tokens that a row's claim of neighbouring pages looks ahead, at most
RUN_SECONDS = 0.2  # a call of several greedy steps, at most: between calls Ctrl-C is seen
STREAM_SECONDS = 0.02  # the same where a streamer waits for tokens: what no reader notices


def rows_of(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The real tokens of each row and their positions, [n_b] each."""
    batch, length = input_ids.shape
    if attention_mask is None:
        keep = None
        positions = torch.arange(length, device=input_ids.device).expand(batch, -1)
    else:
        keep = attention_mask.bool()
        positions = (keep.long().cumsum(-1) - 1).clamp_min(0)
    if position_ids is not None:
        positions = position_ids.expand(batch, -1)
    if keep is None:
        return list(input_ids), list(positions)
    return [i[k] for i, k in zip(input_ids, keep, strict=True)], [
        p[k] for p, k in zip(positions, keep, strict=True)
    ]


class Rows:
    """The sequences of one `generate` call: prefilled once per distinct prompt, stepped together."""

    def __init__(self, runner: Runner, limit: int | None):
        self.runner, self.limit = runner, limit
        self.sequences: list[Sequence] = []
        self.positions: torch.Tensor | None = None  # [B] of the next token
        self.every: torch.Tensor | None = None  # arange(B)

    def prefill(self, ids, positions, copies: int, new_tokens: int, chunk_tokens: int | None) -> torch.Tensor:
        """Run the prompts; each becomes `copies` rows that share its pages. Returns [B * copies, vocab]."""
        self._check(max(int(p.max()) for p in positions))
        pool, ahead = self.runner.pool, min(new_tokens, CLAIM_TOKENS)
        pages = sum(-(-(len(i) + ahead) // pool.page_tokens) for i in ids)
        pool.reserve(pages + len(ids) * (copies - 1) * -(-ahead // pool.page_tokens))
        firsts = []
        for row in ids:
            firsts.append(self.runner.sequence(expect_tokens=len(row) + ahead))
            self.sequences.append(firsts[-1])
        logits = self.runner.prefill(ids, positions, firsts, chunk_tokens=chunk_tokens)
        if copies > 1:
            ordered = []
            for first in firsts:
                ordered.append(first)
                for _ in range(copies - 1):
                    twin = first.fork(expect_tokens=ahead)
                    self.sequences.append(twin)
                    ordered.append(twin)
            self.sequences[:] = ordered
        last = torch.stack([p[-1] for p in positions]) + 1
        self.positions = last.repeat_interleave(copies)
        self.every = torch.arange(len(self.positions), device=self.positions.device)
        return logits.repeat_interleave(copies, dim=0)

    def step(self, tokens: torch.Tensor, rows: list[int] | None) -> torch.Tensor:
        """Append one token to each of the rows (None: all): their logits [len(rows), vocab]."""
        tokens, positions, sequences = self._of(tokens, rows)
        count = len(sequences)
        return self.runner.step(tokens, positions, sequences, [1] * count, self.every[:count])

    @property
    def has_candidates(self) -> bool:
        return hasattr(self.runner.executor, "best")

    def candidates(self, tokens: torch.Tensor, rows: list[int] | None, top: int) -> tuple[torch.Tensor, ...]:
        """As `step`, but what `Runner.candidates` returns."""
        return self.runner.candidates(*self._of(tokens, rows), top)

    def greedy(
        self, tokens: torch.Tensor, rows: list[int] | None, ahead: int, ends: torch.Tensor | None
    ) -> torch.Tensor:
        """Append one token to each of the rows and go on greedily: [n <= ahead, len(rows)] chosen tokens."""
        tokens, positions, sequences = self._of(tokens, rows)
        if self.limit is not None:
            ahead = min(ahead, self.limit - int(positions.max()))
        chosen = self.runner.greedy(tokens, positions, sequences, ahead=ahead, ends=ends)
        if len(chosen) > 1:
            self.positions[slice(None) if rows is None else rows] += len(chosen) - 1
        return chosen

    def _of(
        self, tokens: torch.Tensor, rows: list[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor, list[Sequence]]:
        """Tokens, positions and sequences of the rows, whose positions move on by one."""
        if rows is None:
            sequences, positions = self.sequences, self.positions
            self.positions = self.positions + 1
        else:
            index = torch.tensor(rows, device=tokens.device)
            sequences, tokens = [self.sequences[row] for row in rows], tokens[index]
            positions = self.positions[index]
            self.positions[index] += 1
        if self.limit is not None:
            self._check(int(positions.max()))
        return tokens, positions, sequences

    def _check(self, position: int) -> None:
        if self.limit is not None and position >= self.limit:
            raise PatchError(
                f"position {position} lies beyond the model's table of {self.limit} learned positions: "
                "shorten the prompt or max_new_tokens"
            )

    def cache(self, length: int, layers: int, mask: torch.Tensor | None) -> PagedCache:
        """The rows as a transformers cache of logical length `length`, whose first slots the mask told apart;
        they belong to it from now on."""
        rows, self.sequences = self.sequences, []
        pads = [length - row.length for row in rows]
        real = mask.bool() if mask is not None and left_padding(mask) is None else None
        return PagedCache(self.runner.pool, layers, sequences=rows, pads=pads, real=real)

    def free(self) -> None:
        while self.sequences:
            self.sequences.pop().free()


def plain_limits(stopping_criteria, input_ids: torch.Tensor) -> tuple[int, frozenset[int]] | None:
    """(maximum length, end tokens) if the criteria are no more than that, else None."""
    length, ends = None, frozenset()
    for criteria in stopping_criteria:
        if type(criteria) is MaxLengthCriteria:
            length = criteria.max_length if length is None else min(length, criteria.max_length)
            table = criteria.max_position_embeddings
            if table is not None and criteria.max_length > table:  # transformers warns once it is passed
                return None
        elif type(criteria) is EosTokenCriteria:
            ends |= frozenset(criteria.eos_token_id.tolist())
        else:
            return None
    return (length, ends) if length is not None and length > input_ids.shape[1] else None


def greedy(
    rows: Rows,
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    length: int,
    ends: frozenset[int],
    pad: torch.Tensor | None,
    streamer,
) -> torch.Tensor:
    """The loop of `sample` for what most calls are: arg-max, no processors, an end by length or end token.

    Several steps are one call of the executor, as many as its time allows.
    """
    batch, at = input_ids.shape
    ids = input_ids.new_full((batch, length), 0 if pad is None else int(pad), dtype=torch.long)
    ids[:, :at] = input_ids
    stops = torch.tensor(sorted(ends), device=ids.device) if ends else None
    alive = None  # all rows
    ahead = 2
    chosen = logits.argmax(-1)[None]
    while True:
        for tokens in chosen:
            ids[slice(None) if alive is None else alive, at] = tokens
            at += 1
            if streamer is not None:
                streamer.put(ids[:, at - 1].cpu())
        if ends:
            left = range(batch) if alive is None else alive
            left = [row for row, token in zip(left, chosen[-1].tolist(), strict=True) if token not in ends]
            alive = None if len(left) == batch else left
        if at == length or alive == []:
            break
        start = time.perf_counter()
        chosen = rows.greedy(ids[:, at - 1], alive, min(ahead, length - at), stops)
        each = (time.perf_counter() - start) / len(chosen)
        ahead = max(1, min(2 * ahead, int((RUN_SECONDS if streamer is None else STREAM_SECONDS) / each)))
    if streamer is not None:
        streamer.end()
    return ids[:, :at].contiguous()


def sample(
    runner: Runner,
    input_ids: torch.Tensor,
    *,
    logits_processor,
    stopping_criteria,
    generation_config,
    streamer=None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    limit: int | None = None,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate for input_ids [B, L] (rows repeated `num_return_sequences` times, as `generate` expands them).

    Args:
        attention_mask: [B, L], zeros are dropped. position_ids: [B or 1, L].
        limit: size of the model's learned position table, or None.
    Returns and the other arguments: as transformers' `_sample`.
    """
    config = generation_config
    detailed = config.return_dict_in_generate
    ends = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
    pad = config._pad_token_tensor
    pad = None if pad is None else pad.to(input_ids.device)

    copies = config.num_return_sequences or 1
    if input_ids.shape[0] % copies:
        copies = 1
    new_tokens = max(0, config.max_length - input_ids.shape[1]) if config.max_length else 0
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
    rows = Rows(runner, limit)
    try:
        ids, positions = rows_of(input_ids, attention_mask, position_ids)
        out = rows.prefill(ids[::copies], positions[::copies], copies, new_tokens, config.prefill_chunk_size)
        plain = not (detailed or config.do_sample or logits_processor)
        if plain and (limits := plain_limits(stopping_criteria, input_ids)) is not None:
            return greedy(rows, out, input_ids, *limits, pad, streamer)
        picker = chooser(rows, out, logits_processor, config)
        while True:
            tokens = picker.choose(input_ids)
            if ends:
                tokens = tokens * unfinished + pad * (1 - unfinished)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            unfinished = unfinished & ~stopping_criteria(input_ids, picker.scores)
            if streamer is not None:
                streamer.put(tokens.cpu())
            if not unfinished.any():
                break
            alive = None
            if not detailed and not unfinished.all():
                alive = unfinished.nonzero().flatten().tolist()
            picker.advance(tokens, alive)
        if streamer is not None:
            streamer.end()
        if not detailed:
            return input_ids
        layers = runner.model.config.get_text_config(decoder=True).num_hidden_layers
        names = {field.name for field in fields(GenerateDecoderOnlyOutput)}
        cache = rows.cache(input_ids.shape[1] - 1, layers, attention_mask)
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=picker.scores,
            logits=picker.raw,
            **{"cache" if "cache" in names else "past_key_values": cache},
        )
    finally:
        rows.free()
