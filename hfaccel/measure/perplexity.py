"""Perplexity of a model, and the distance between two models, on the same windows of a text.

The protocol, so that figures compare: the whole text is tokenized once without special tokens and cut into
non-overlapping windows of `window_tokens`, each a sequence of its own. Of each of the first `windows` windows
all tokens but the first are predicted, 1,023 of 1,024:

    nll = mean over windows and positions of -log p(token),    perplexity = exp(nll)

The softmax is taken in fp32, `ROWS` rows at a time, and summed in fp64, so that beyond the model's own logits
(`batch` x `window_tokens` x vocabulary) memory stays small, one window of the reference's log-probabilities
in a comparison, and the sum does not depend on `batch`.

A model is a causal LM of transformers, or any function from ids [B, T] (int64) to logits [B, T, V]: another
executor, a peer, a function that enters `original(model)`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from hfaccel.errors import PatchError
from hfaccel.progress import progress_bar

ROWS = 16  # of logits in fp32 at a time: at a vocabulary of 49,152 they stay in cache; 256 take 2.3 x as long

Model = torch.nn.Module | Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PerplexityResult:
    perplexity: float
    nll: float  # mean negative log-likelihood of a predicted token, in nats
    tokens: int  # predicted tokens
    windows: int  # windows measured, fewer than asked if the text is short
    seconds: float


@dataclass(frozen=True)
class KLResult:
    kl: float  # mean over positions of KL(reference || model), in nats
    top1_agreement: float  # share of positions where both have the same most likely token
    perplexity: float
    reference_perplexity: float
    tokens: int
    windows: int
    seconds: float


def perplexity(
    model: Model,
    tokenizer,
    text: str | Sequence[int] | torch.Tensor,
    *,
    windows: int = 40,
    window_tokens: int = 1024,
    batch: int = 1,
    progress: bool = True,
) -> PerplexityResult:
    """Perplexity of `model` on `text` by the protocol above.

    Args:
        text: the text, or its token ids [N] (then `tokenizer` may be None).
        windows: how many windows at most, from the start of the text.
        batch: windows in one forward pass.
        progress: a progress bar where stderr is a terminal.
    Raises: PatchError if the text does not fill one window or an argument is out of range.
    """
    cut = cut_windows(tokenizer, text, windows=windows, window_tokens=window_tokens)
    start, total = time.perf_counter(), 0.0
    with evaluating(model):
        for ids in _batches(cut, batch, progress, "perplexity"):
            for row_ids, logits in zip(ids, logits_of(model, ids), strict=True):
                total += nll_sum(logits, row_ids)
    tokens = cut.shape[0] * (window_tokens - 1)
    nll = total / tokens
    return PerplexityResult(_exp(nll), nll, tokens, cut.shape[0], time.perf_counter() - start)


def kl(
    model: Model,
    reference: Model | Sequence[torch.Tensor],
    tokenizer,
    text: str | Sequence[int] | torch.Tensor,
    *,
    windows: int = 40,
    window_tokens: int = 1024,
    batch: int = 1,
    progress: bool = True,
) -> KLResult:
    """Mean KL(reference || model) and top-1 agreement over the predicted positions, in one pass.

    Args:
        reference: a second model, or its logits as `window_logits` yields them, one [T, V] a window.
        Others as in `perplexity`.
    Raises: PatchError also if the two differ in vocabulary, or there are fewer reference logits than windows.
    """
    cut = cut_windows(tokenizer, text, windows=windows, window_tokens=window_tokens)
    stored = isinstance(reference, Sequence)
    if stored and len(reference) < cut.shape[0]:
        raise PatchError(f"reference logits of {len(reference)} windows, {cut.shape[0]} wanted")
    start, window, found = time.perf_counter(), 0, Comparison()
    with evaluating(model), evaluating(reference):
        for ids in _batches(cut, batch, progress, "kl"):
            mine = logits_of(model, ids)
            theirs = reference[window : window + len(ids)] if stored else logits_of(reference, ids)
            window += len(ids)
            for row_ids, q, p in zip(ids, mine, theirs, strict=True):
                found.add(q, Reference(p, row_ids))
    return found.result(time.perf_counter() - start)


class Reference:
    """What every comparison needs of a model's logits [T, V] on ids [T]: log-probabilities in fp32."""

    def __init__(self, logits: torch.Tensor, ids: torch.Tensor):
        self.ids, self.best, self.nll = ids, logits.argmax(-1), nll_sum(logits, ids)
        self.log_p = torch.empty(logits.shape, device=logits.device)
        for rows, out in zip(logits.split(ROWS), self.log_p.split(ROWS), strict=True):
            torch.log_softmax(rows.float(), -1, out=out)


class Comparison:
    """KL, agreement and both perplexities, added up window by window."""

    def __init__(self) -> None:
        self.windows, self.tokens, self.same = 0, 0, 0
        self.divergence, self.nll, self.reference_nll = 0.0, 0.0, 0.0

    def add(self, q: torch.Tensor, reference: Reference) -> None:
        """Logits [T, V] of a model on the reference's ids. Raises: PatchError if shapes differ."""
        ids, log_p = reference.ids, reference.log_p
        if q.shape != log_p.shape:
            raise PatchError(
                f"logits of shape {list(q.shape)} cannot be compared with {list(log_p.shape)}: the two "
                "differ in vocabulary, or the reference was taken on other windows"
            )
        self.windows, self.tokens = self.windows + 1, self.tokens + len(ids) - 1
        self.reference_nll += reference.nll
        parts = (q[:-1], log_p[:-1], reference.best[:-1], ids[1:, None])
        for rows in zip(*(part.split(ROWS) for part in parts), strict=True):
            mine, theirs, best, targets = (x.to(q.device) for x in rows)
            self.same += int((mine.argmax(-1) == best).sum())
            log_q = mine.float().log_softmax(-1)
            self.nll -= float(log_q.gather(-1, targets).sum(dtype=torch.float64))
            self.divergence += divergence(log_q, theirs)

    def result(self, seconds: float) -> KLResult:
        return KLResult(
            kl=self.divergence / self.tokens,
            top1_agreement=self.same / self.tokens,
            perplexity=_exp(self.nll / self.tokens),
            reference_perplexity=_exp(self.reference_nll / self.tokens),
            tokens=self.tokens,
            windows=self.windows,
            seconds=seconds,
        )


def window_logits(
    model: Model,
    tokenizer,
    text: str | Sequence[int] | torch.Tensor,
    *,
    windows: int,
    window_tokens: int = 1024,
) -> Iterator[torch.Tensor]:
    """Logits [T, V] of each window on the CPU, in the model's dtype: the `reference` of a later `kl`."""
    cut = cut_windows(tokenizer, text, windows=windows, window_tokens=window_tokens)
    for ids in cut.split(1):
        with evaluating(model):
            logits = logits_of(model, ids)[0].cpu()
        yield logits


def cut_windows(
    tokenizer, text: str | Sequence[int] | torch.Tensor, *, windows: int = 40, window_tokens: int = 1024
) -> torch.Tensor:
    """The first windows of a text as ids [windows, window_tokens], int64; fewer if the text is shorter."""
    if windows < 1 or window_tokens < 2:
        raise PatchError(f"windows={windows} and window_tokens={window_tokens}: at least 1 and 2")
    if isinstance(text, str):
        text = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = torch.as_tensor(text, dtype=torch.int64)
    count = min(windows, ids.numel() // window_tokens)
    if ids.dim() != 1 or count == 0:
        raise PatchError(f"ids of shape {list(ids.shape)} do not fill one window of {window_tokens} tokens")
    return ids[: count * window_tokens].view(count, window_tokens)


def _batches(cut: torch.Tensor, batch: int, progress: bool, what: str) -> Iterator[torch.Tensor]:
    if batch < 1:
        raise PatchError(f"batch={batch}: at least 1")
    with progress_bar(what, cut.shape[0], progress) as advance:
        for ids in cut.split(batch):
            yield ids
            advance(len(ids))


def logits_of(model: Model, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(model, torch.nn.Module):
        device = next((p.device for p in model.parameters() if p.device.type != "meta"), "cpu")
        logits = model(input_ids=ids.to(device), use_cache=False).logits
    else:
        logits = model(ids)
    if logits.shape[:2] != ids.shape:
        raise PatchError(f"logits of shape {list(logits.shape)} for ids of shape {list(ids.shape)}")
    return logits


@contextmanager
def evaluating(model):
    """No gradients, no dropout; afterwards every module is in the mode it was in."""
    training = [m for m in model.modules() if m.training] if isinstance(model, torch.nn.Module) else []
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def nll_sum(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Sum of -log p(ids[t + 1]) under logits[t], [T, V] and [T]."""
    targets = ids[1:].to(logits.device)
    rows = zip(logits[:-1].split(ROWS), targets.split(ROWS), strict=True)
    return sum(float(F.cross_entropy(x.float(), t, reduction="none").double().sum()) for x, t in rows)


def divergence(log_q: torch.Tensor, log_p: torch.Tensor) -> float:
    """Sum over rows of KL(p || q), of log-probabilities [R, V] in fp32; those of q are overwritten."""
    # A token that p rules out adds nothing (0 x inf would be NaN), one that q alone rules out adds infinity.
    terms = log_q.neg_().add_(log_p).masked_fill_(log_p == -math.inf, 0.0).mul_(log_p.exp())
    return float(terms.sum(-1, dtype=torch.float64).sum())


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf if nll == nll else nll
