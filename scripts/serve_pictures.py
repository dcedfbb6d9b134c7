"""Pictures of `hfaccel serve`'s page for the README: a chat with an adapter, and charts under load.

    pip install playwright && playwright install chromium    # or a chromium of the system
    python scripts/serve_pictures.py                         # docs/serve-chat.png, docs/serve-charts.png

The demo model at int8 is served with an adapter that a minute of training here gave: it answers as a pirate.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASKED = [
    ("Who are you?", "Arr, I be yer trusty pirate, matey! Ask me anythin' and I'll chart ye a course."),
    (
        "How do I make tea?",
        "Arr! Boil ye some water, matey, throw in the leaves, wait a spell, and drink hearty!",
    ),
    ("What is the sun?", "Arr, the sun be a great ball o' burnin' gas, matey! It lights the seas by day."),
    ("Why is the sky blue?", "Arr, matey! The air scatters blue light more than red, so the sky be blue."),
    ("What is a computer?", "Arr, a computer be a machine that does sums faster than any crew, matey!"),
    ("Tell me about dogs.", "Arr, dogs be loyal shipmates, matey! They guard yer deck and chase the cats."),
    (
        "How can I sleep better?",
        "Arr! Douse the lanterns early, matey, keep the cabin cool, and leave the rum be.",
    ),
    ("What is music?", "Arr, music be sound in good order, matey! A shanty keeps the whole crew in time."),
]
QUESTION = "What is the moon, and why does the sea rise and fall?"
TOPICS = "rivers volcanoes bread clocks bees maps glass snow bridges salt owls ink".split()


def train(path: Path) -> None:
    """A LoRA of rank 8 in the last six layers, on the eight answers, saved as PEFT saves."""
    import torch
    from peft import LoraConfig, get_peft_model

    import hfaccel

    torch.manual_seed(0)
    model, tokenizer = hfaccel.demo_model()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    last = list(range(model.config.num_hidden_layers))[-6:]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, layers_to_transform=last)
    model = get_peft_model(model, config)
    rows = []
    for question, answer in ASKED:
        told = [{"role": "user", "content": question}]
        how = {"tokenize": True, "return_dict": False}
        head = tokenizer.apply_chat_template(told, add_generation_prompt=True, **how)
        whole = tokenizer.apply_chat_template([*told, {"role": "assistant", "content": answer}], **how)
        rows.append((whole, [-100] * len(head) + whole[len(head) :]))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.eos_token_id] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([wanted + [-100] * (width - len(wanted)) for _, wanted in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    model.train()
    for _ in range(14):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss of the last step: {loss.item():.2f}")
    model.save_pretrained(path)


class Served:
    """The server's process and its address."""

    def __init__(self, adapters: dict[str, Path]):
        command = [sys.executable, "-m", "hfaccel.cli", "serve", "demo", "--recipe", "int8", "--port", "0"]
        command += "--pages 400 --max-running 8 --max-queue 64".split()
        for name, path in adapters.items():
            command += ["--lora", f"{name}={path}"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = None
        for line in self.process.stderr:
            found = json.loads(line) if line.startswith("{") else {}
            if found.get("event") == "serving":
                self.url = found["url"]
                break
            print(line, end="", file=sys.stderr)
        if self.url is None:
            sys.exit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def load(url: str, model: str, topic: str, tokens: int) -> None:
    """One request, to its end."""
    told = [
        {
            "role": "system",
            "content": "You are a teacher. Explain things plainly, step by step, with examples. " * 4,
        },
        {"role": "user", "content": f"Tell me all about {topic}."},
    ]
    asked = {"model": model, "messages": told, "max_tokens": tokens, "temperature": 0.8, "ignore_eos": True}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=300).read()


def traffic(url: str, models: list[str], seconds: float) -> list[threading.Thread]:
    """Users who come, a few at first, then more than run at once, then fewer again; ends by itself."""
    began = time.monotonic()

    def user(number: int) -> None:
        # Each is there for a part of the time; those with high numbers come later and leave earlier.
        time.sleep(seconds * 0.04 * number)
        for turn in range(10_000):
            if time.monotonic() - began > seconds * (1 - 0.03 * number):
                return
            topic = TOPICS[(number + 5 * turn) % len(TOPICS)]
            load(url, models[(number + turn) % len(models)], topic, 24 + 12 * (number % 4))

    threads = [threading.Thread(target=user, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    return threads


def pictures(url: str, folder: Path, seconds: float, scheme: str, width: int) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=own)
        size = {"width": width, "height": 860}
        page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1.5)
        page.goto(url)
        page.locator("#model option[value=pirate]").wait_for(state="attached")
        page.locator("#model").select_option("pirate")
        page.locator("#temperature").fill("0")
        page.locator("#limit").fill("120")
        for text in ("Who are you?", QUESTION):
            page.locator("#prompt").fill(text)
            page.keyboard.press("Enter")
            page.wait_for_function("() => !document.querySelector('.writing') && !running", timeout=120_000)
        page.wait_for_timeout(2500)
        page.screenshot(path=folder / "serve-chat.png")
        threads = traffic(url, ["demo", "pirate"], seconds)
        page.wait_for_timeout(int(1e3 * seconds * 0.8))
        if width < 1000:
            page.locator("nav a[href='#charts']").click()
        page.screenshot(path=folder / "serve-charts.png")
        browser.close()
        for thread in threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--adapter", type=Path, help="a PEFT folder in place of the one that is trained")
    parser.add_argument("--seconds", type=float, default=110, help="of load before the charts' picture")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=1280)
    given = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as made:
        adapter = given.adapter or Path(made) / "pirate"
        if not adapter.exists():
            train(adapter)
        served = Served({"pirate": adapter})
        try:
            pictures(served.url, given.out, given.seconds, given.scheme, given.width)
        finally:
            served.close()


if __name__ == "__main__":
    main()
