"""What a step computes: its requests' tokens through the runner, and what is chosen from their logits."""

from __future__ import annotations

import itertools

import torch

from hfaccel.lora.slots import AdapterSlots
from hfaccel.runtime.runner import Runner
from hfaccel.serve.draw import draw, wanted
from hfaccel.serve.requests import Request
from hfaccel.serve.sampling import scores

# A request, and its next token, why it has none, or None where it is embedded.
Chosen = tuple[Request, "int | Exception | None"]


class Forward:
    """Args: vocab: rows of the embedding; a head may have more."""

    def __init__(self, runner: Runner, slots: AdapterSlots, vocab: int):
        self.runner, self.slots, self.vocab = runner, slots, vocab
        head = runner.model.get_output_embeddings()
        self._most_candidates = min(vocab, getattr(head, "out_features", vocab))

    def run(self, chunks: dict[Request, int]) -> list[Chosen]:
        """Compute so many tokens of each request: the next one of each that is complete now."""
        slots = {request: self.slots.slot(request.lora) for request in chunks}
        # Tokens of one adapter lie together: the kernels read its matrices once.
        chunks = {request: chunks[request] for request in sorted(slots, key=slots.get)}
        done: list[Chosen] = []
        if any(request.options.embed for request in chunks):
            embedded = {request: count for request, count in chunks.items() if request.options.embed}
            done += self._embed(embedded, slots)
            chunks = {request: count for request, count in chunks.items() if not request.options.embed}
        return done + self._next(chunks, slots) if chunks else done

    def _next(self, chunks: dict[Request, int], slots) -> list[Chosen]:
        """The next token of each request that is complete now, or why it has none."""
        ids, positions, asked, ready, end = [], [], [], [], 0
        prompts: list[tuple[Request, range]] = []  # tokens of prompts that are scored, and their rows after
        for request, count in chunks.items():
            at = request.computed
            ids += request.part(at, count)
            positions += range(at, at + count)
            end += count
            if count == request.left:
                asked.append(end - 1)
                ready.append(request)
                if request.constraint is not None:
                    request.constraint.prepare()
            if request.options.prompt_logprobs is not None and not request.output:
                prompts.append((request, range(at + 1, min(at + count + 1, len(request.prompt)))))
        starts = itertools.accumulate((0, *chunks.values()))
        begins = dict(zip(chunks, starts, strict=False))
        asked += [begins[request] + n for request, scored in prompts for n in range(len(scored))]
        device = self.runner.model.device
        inputs = [torch.tensor(x, dtype=torch.long, device=device) for x in (ids, positions, asked)]
        sequences, counts = [r.sequence for r in chunks], list(chunks.values())
        adapters = [slots[request] for request in chunks]
        drawn = [n for n, request in enumerate(ready) if not request.plain]
        top = min(max([1, *(wanted(ready[n]) for n in drawn)]), self._most_candidates)
        if asked and hasattr(self.runner.executor, "best"):
            rows = {"counts": counts, "rows": inputs[2], "adapters": adapters}
            values, ids, logits = self.runner.candidates(*inputs[:2], sequences, top, **rows)
        else:
            logits = self.runner.step(*inputs[:2], sequences, counts, inputs[2], adapters=adapters)
            values, ids = _best(logits[: len(ready)], top)
        found: list[int | Exception] = ids[: len(ready), 0].tolist()
        if drawn:
            values, ids = values.cpu().numpy(), ids.cpu().numpy()
        for n in drawn:
            found[n] = _drawn(logits[n], ready[n], values[n], ids[n])
        self._score(logits, ready, found)
        self._score_prompts(logits[len(ready) :], prompts)
        return list(zip(ready, found, strict=True))

    def _score(self, logits: torch.Tensor, ready: list[Request], found: list[int | Exception]) -> None:
        """Scores of the tokens that were found, for those who ask."""
        rows = [
            n
            for n, (request, token) in enumerate(zip(ready, found, strict=True))
            if request.options.logprobs is not None and isinstance(token, int) and token < self.vocab
        ]
        if rows:
            tops = [ready[n].options.logprobs for n in rows]
            of = scores(logits[rows][:, : self.vocab], [found[n] for n in rows], tops)
            for n, score in zip(rows, of, strict=True):
                ready[n].scores.append(score)

    def _score_prompts(self, logits: torch.Tensor, prompts: list[tuple[Request, range]]) -> None:
        """Scores of tokens of prompts, by the rows before them."""
        at = 0
        for request, scored in prompts:
            rows, at = logits[at : at + len(scored), : self.vocab], at + len(scored)
            if scored.start == 1:  # anew, where it was preempted
                request.prompt_scores = []
            if len(scored):
                tokens = request.prompt[scored.start : scored.stop]
                tops = [request.options.prompt_logprobs] * len(tokens)
                request.prompt_scores += scores(rows, tokens, tops)

    def _embed(self, chunks: dict[Request, int], slots) -> list[Chosen]:
        """Add up hidden states of prompts; those that are complete have their mean."""
        device, counts = self.runner.model.device, list(chunks.values())
        begins = [request.computed for request in chunks]
        ids = [i for request, count in chunks.items() for i in request.part(request.computed, count)]
        at = [p for begin, count in zip(begins, counts, strict=True) for p in range(begin, begin + count)]
        inputs = [torch.tensor(x, dtype=torch.long, device=device) for x in (ids, at, range(len(ids)))]
        sequences, adapters = [r.sequence for r in chunks], [slots[r] for r in chunks]
        complete = [request for request, count in chunks.items() if count == request.left]
        states = self.runner.step(
            *inputs[:2], sequences, counts, inputs[2], hidden=True, adapters=adapters
        ).split(counts)
        for request, begin, rows in zip(chunks, begins, states, strict=True):
            added = rows.float().sum(0).cpu()
            request.embedding = added if begin == 0 else request.embedding + added
        for request in complete:
            request.embedding /= len(request.prompt)
        return [(request, None) for request in complete]


def _best(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top` largest logits of each row, fp32, and their ids, as `Runner.candidates` has them."""
    if top == 1:
        values, ids = logits.max(-1, keepdim=True)
        return values.float(), ids
    values, ids = logits.float().topk(top, dim=-1)
    ids, order = ids.sort(-1)  # equal ones by id
    values, again = values.gather(-1, order).sort(-1, descending=True, stable=True)
    return values, ids.gather(-1, again)


def _drawn(row: torch.Tensor, request: Request, values, ids) -> int | Exception:
    try:
        return draw(row, request, values, ids)
    except Exception as error:
        return error
