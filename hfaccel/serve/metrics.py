"""What Prometheus reads at /metrics. Where vLLM counts the same thing the name is vLLM's (`vllm:...`), so
that its dashboards show this server too; what it has no name for is `hfaccel:...`. Times of tokens are
counted as the tokens come, and not when their request is over: what is slow is seen while it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from hfaccel.serve.answers import Choice

SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LONG_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
LENGTHS = tuple(x * 10**power for power in range(6) for x in (1, 2, 5))
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters of one server, in a registry of their own.

    Args:
        stats: of the engine, read when somebody looks. adapters: names of those that are loaded.
    """

    def __init__(self, model: str, stats: Callable[[], dict[str, Any]], adapters: Callable[[], list[str]]):
        self.model, self.stats, self.adapters = model, stats, adapters
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(self))

        def counter(name, what, *labels):
            made = Counter(name, what, ["model_name", *labels], registry=self.registry)
            return made if labels else made.labels(model)

        def histogram(name, what, buckets):
            made = Histogram(name, what, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model)

        self.ttft = histogram("vllm:time_to_first_token_seconds", "Until the first token.", SHORT_S)
        self.gap = histogram("vllm:inter_token_latency_seconds", "From a token to the next one.", TOKEN_S)
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean after its first token.", TOKEN_S
        )
        self.latency = histogram("vllm:e2e_request_latency_seconds", "Of a request, whole.", LONG_S)
        self.queue = histogram("vllm:request_queue_time_seconds", "Until a request has pages.", LONG_S)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Of a request.", LENGTHS)
        self.answer_length = histogram("vllm:request_generation_tokens", "Of a request.", LENGTHS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Of requests whose prompt is computed.")
        self.succeeded = counter("vllm:request_success", "Requests by how they ended.", "finished_reason")
        self.errors = counter("hfaccel:request_errors", "Refused and failed HTTP requests.", "status", "code")
        self.loads = counter("hfaccel:adapter_loads", "Adapters that were loaded by request.")

    def began(self, choice: Choice) -> None:
        """A choice has its first token, or is over without one."""
        request = choice.opened.request
        if choice.first_s is not None:
            self.ttft.observe(choice.first_s - choice.began_s)
        if request.began is not None:
            self.queue.observe(request.began - request.arrival)
        self.prompt_tokens.inc(len(choice.prompt))

    def finished(self, choice: Choice) -> None:
        """A choice has its answer."""
        answer, count = choice.answer, len(choice.answer.ids)
        self.latency.observe(choice.last_s - choice.began_s)
        if count > 1:
            self.per_token.observe((choice.last_s - choice.first_s) / (count - 1))
        self.prompt_length.observe(answer.prompt_tokens)
        self.answer_length.observe(count)
        self.succeeded.labels(self.model, answer.finish_reason).inc()

    def failed(self, status: int, code: str | None) -> None:
        self.errors.labels(self.model, str(status), code or "").inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engine:
    """What the engine holds now, and its own counts."""

    def __init__(self, metrics: Metrics):
        self.metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats, model = self.metrics.stats(), self.metrics.model

        def gauge(name, what, value):
            made = GaugeMetricFamily(name, what, labels=["model_name"])
            made.add_metric([model], value)
            return made

        def counter(name, what, value):
            made = CounterMetricFamily(name, what, labels=["model_name"])
            made.add_metric([model], value)
            return made

        pages, used = stats["pages"], stats["used_pages"]
        cached = stats["cached_pages"]
        yield gauge("vllm:num_requests_running", "Requests that hold pages.", stats["running"])
        yield gauge("vllm:num_requests_waiting", "Requests that wait for pages.", stats["waiting"])
        yield gauge("vllm:kv_cache_usage_perc", "Share of pages in use, cached ones included.", used / pages)
        yield gauge("hfaccel:kv_pages", "Pages of keys and values.", pages)
        yield gauge("hfaccel:kv_pages_cached", "Pages that the prefix cache holds.", cached)
        yield counter("vllm:num_preemptions", "Requests that gave their pages up.", stats["preemptions"])
        yield counter(
            "vllm:prefix_cache_queries", "Tokens looked for in the cache.", stats["admitted_tokens"]
        )
        yield counter("vllm:prefix_cache_hits", "Tokens found in the cache.", stats["cached_tokens"])
        yield counter("vllm:generation_tokens", "Given out.", stats["answer_tokens"])
        yield counter("hfaccel:engine_steps", "Steps of the engine.", stats["steps"])
        names = self.metrics.adapters()
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters that are loaded.",
            labels=["max_lora", "running_lora_adapters"],
        )
        lora.add_metric([str(stats.get("lora_slots", "")), ",".join(names)], time.time())
        yield lora
