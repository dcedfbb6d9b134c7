"""page/: in headless Chromium, against `hfaccel serve` in a process of its own."""

import json
import re
import shutil
import threading

import httpx
import pytest

from live import Live, folder
from lora_folders import adapter
from tiny import tiny

sync = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright: not installed")
KEY = "a-key"
MARKUP = '</div><img src=x onerror="document.title=1"><script>document.title=1</script>&lt;<b>'
WITHIN_MS = 20_000


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    adapter(tiny("TL"), root / "adapter", seed=1)
    args = "--name tl --recipe int8 --pages 700 --max-running 4 --max-queue 4".split()
    live = Live(folder(root / "model"), *args, "--api-key", KEY, "--lora", f"tuned={root / 'adapter'}")
    yield live
    live.stop()


@pytest.fixture(scope="module")
def browser():
    with sync.sync_playwright() as playwright:
        own = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            browser = playwright.chromium.launch(executable_path=own)
        except sync.Error as why:
            pytest.skip(f"no Chromium is found: {str(why).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def page(browser, live):
    """The page with its key given; what it logs as an error fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(WITHIN_MS)
    page = context.new_page()
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.add_init_script(
        "addEventListener('securitypolicyviolation', e => { throw Error(e.violatedDirective) })"
    )
    page.goto(live.url)
    give_key(page, KEY)
    page.locator("#model option").first.wait_for(state="attached")
    yield page
    context.close()
    assert page.wrong == []


def give_key(page, key):
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").blur()


def ask(page, text, **settings):
    for label, value in settings.items():
        page.get_by_label(label.replace("_", " ")).fill(str(value))
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page, text):
    """Have the page get this as a model's answer."""
    deltas = [{"content": part} for part in (text[:9], text[9:])]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    lines = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            headers={"content-type": "text/event-stream"}, body="".join(lines) + "data: [DONE]\n\n"
        ),
    )


def of_chart(page, title):
    """What a chart says now, by name."""
    label = (
        page.locator("svg", has=page.locator("path"))
        .and_(page.get_by_label(f"{title}, "))
        .get_attribute("aria-label")
    )
    return dict(re.findall(r"[,;] ([a-z0-9 ]+?) ([\d.–]+k?)", label.split(";")[0]))


# -- how it is sent


def test_it_comes_without_a_key_and_with_a_strict_policy(live):
    got = httpx.get(live.url)
    assert got.status_code == 200 and got.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in got.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy[kind])


def test_it_asks_nobody_else_for_anything(browser, live):
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(live.url)
    page.locator("#state.up").wait_for()
    page.close()
    paths = {url.removeprefix(live.url) for url in asked if not url.startswith("data:")}
    assert paths == {"/", "/v1/models", "/metrics"}


# -- chat


def test_a_chat_with_an_adapter_streams_text(page, live):
    bodies = []
    page.on("request", lambda request: bodies.append(request) if request.method == "POST" else None)
    assert page.locator("optgroup[label=Adapters] option").all_inner_texts() == ["tuned"]
    page.get_by_label("Model").select_option("tuned")
    ask(page, "hello the world", Temperature=0, Max_tokens=600)
    said = page.locator("article.model .said")
    page.wait_for_function("() => document.querySelector('.writing .said')?.textContent.length > 20")
    early = said.inner_text()
    assert page.locator("#log").get_attribute("aria-busy") == "true"
    page.locator("article.model button", has_text="Copy").wait_for()
    whole = said.inner_text()
    assert whole.startswith(early) and len(whole) > len(early)
    facts = page.locator(".meta").inner_text()
    assert facts.startswith("600 tokens · ") and "tokens/s" in facts and "ended at max tokens" in facts
    body = json.loads(bodies[0].post_data)
    assert body["model"] == "tuned" and body["max_tokens"] == 600 and body["stream"]
    asked = {"model": "tuned", "messages": body["messages"], "temperature": 0, "max_tokens": 600}
    headers = {"authorization": f"Bearer {KEY}"}
    got = httpx.post(live.url + "/v1/chat/completions", json=asked, headers=headers, timeout=60).json()
    assert said.text_content() == got["choices"][0]["message"]["content"]


def test_a_conversation_goes_on_and_begins_anew(page):
    bodies = []
    page.on("request", lambda one: bodies.append(json.loads(one.post_data)) if one.method == "POST" else None)
    for text in ("hello", "the world"):
        ask(page, text, Max_tokens=3)
        page.locator("#send:visible").wait_for()
    first, second = [body["messages"] for body in bodies]
    assert [one["role"] for one in second] == ["user", "assistant", "user"]
    assert second[0] == first[0] and second[2]["content"] == "the world"
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    ask(page, "era")
    page.wait_for_function("() => document.querySelectorAll('article').length == 2")
    assert bodies[2]["messages"] == [{"role": "user", "content": "era"}]


def test_stop_ends_an_answer_on_the_server_too(page, live):
    ask(page, "hello the world", Max_tokens=3000)
    page.wait_for_function("() => document.querySelector('.writing .said')?.textContent.length > 5")
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped", exact=False).first.wait_for(state="attached")
    page.locator("#send:visible").wait_for()
    assert int(re.match(r"≈ (\d+) tokens", page.locator(".meta").inner_text())[1]) < 3000
    for _ in range(100):
        running = re.search(r"num_requests_running\{.*\} (\S+)", httpx.get(live.url + "/metrics").text)[1]
        if float(running) == 0:
            return
        page.wait_for_timeout(20)
    pytest.fail("the request runs on")


def test_markup_in_an_answer_stays_text(page):
    title = page.title()
    answered(page, MARKUP)
    ask(page, MARKUP)
    page.locator("article.model button", has_text="Copy").wait_for()
    assert page.locator("article.model .said").text_content() == MARKUP
    assert page.locator("article.user .said").text_content() == MARKUP
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.title() == title


def test_the_browser_refuses_markup_from_text(page):
    """What the policy is for: a mistake in the page's own script."""
    put = "() => { try { document.body.innerHTML = '<p>x</p>' } catch (e) { return e.name } }"
    with page.expect_event("pageerror"):
        assert page.evaluate(put) == "TypeError"
    assert page.wrong == ["require-trusted-types-for"]
    page.wrong.clear()


# -- errors


def test_a_wrong_key_is_told_and_kept_for_the_tab_only(page, live):
    give_key(page, "wrong")
    box = page.get_by_role("alert").last
    box.wait_for()
    assert "valid API key" in box.inner_text() and "HTTP 401" in box.inner_text()
    page.get_by_label("API key").press_sequentially("x")
    assert page.evaluate("() => [sessionStorage.getItem('key'), localStorage.length, document.cookie]") == [
        "wrong",
        0,
        "",
    ]
    page.reload()
    assert page.get_by_label("API key").input_value() == "wrong"
    page.wait_for_function("() => document.activeElement.id == 'key'")


def test_a_refusal_says_which_field_and_gives_the_text_back(page):
    ask(page, "the " * 5000)
    box = page.get_by_role("alert")
    box.wait_for()
    said = box.inner_text()
    assert "maximum context length" in said and "field messages" in said and "HTTP 400" in said
    assert page.get_by_label("Message", exact=True).input_value() == ("the " * 5000).strip()
    ask(page, "hello", Max_tokens=3)
    page.locator("article.model button", has_text="Copy").wait_for()


def test_a_full_queue_says_when_to_come_again(page, live):
    asked = {"model": "tl", "prompt": "hello", "max_tokens": 3000, "ignore_eos": True, "n": 8}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream(
        "POST", live.url + "/v1/completions", json=asked | {"stream": True}, headers=headers, timeout=60
    ) as busy:
        assert busy.status_code == 200, busy.read()
        lines = busy.iter_lines()  # dropped, it would close the connection
        next(lines)
        ask(page, "hello")
        box = page.get_by_role("alert")
        box.wait_for()
    assert re.search(r"The server is busy: try again in \d+ s", box.inner_text())
    assert "HTTP 429 · rate_limit_error · queue_full" in box.inner_text()


def test_an_error_within_a_stream_is_told(page):
    error = {"error": {"message": "the engine broke", "type": "server_error", "param": None, "code": "x"}}
    body = f'data: {{"choices": [{{"delta": {{"content": "so far"}}}}]}}\n\ndata: {json.dumps(error)}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    ask(page, "hello")
    page.get_by_role("alert").wait_for()
    assert "the engine broke" in page.get_by_role("alert").inner_text()
    assert page.locator("article.model .said").inner_text() == "so far"


def test_a_server_that_is_gone_is_told(page):
    page.locator("#state.up").wait_for()
    page.context.set_offline(True)
    ask(page, "hello")
    page.get_by_role("alert").wait_for()
    assert "does not answer" in page.get_by_role("alert").inner_text()
    page.locator("#state.down").wait_for()
    page.context.set_offline(False)
    page.locator("#state.up").wait_for()


# -- charts


def test_charts_change_under_load(page, live):
    page.locator("#state.up").wait_for()
    assert of_chart(page, "Requests") == {"running": "0", "waiting": "0"}
    assert of_chart(page, "Adapters")["loaded"] == "1"
    asked = {"model": "tuned", "prompt": "hello the " * 40, "max_tokens": 500, "ignore_eos": True, "n": 6}
    headers = {"authorization": f"Bearer {KEY}"}
    over = threading.Event()

    def load():
        while not over.is_set():
            httpx.post(live.url + "/v1/completions", json=asked, headers=headers, timeout=60)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        page.locator("svg[aria-label^='Requests, running 4, waiting 2']").wait_for()
        page.wait_for_function(
            "() => ['Time to first token', 'Time between tokens', 'Prompt tokens found cached', 'KV pages',"
            " 'Tokens per second'].every(title =>"
            " /[1-9]/.test(document.querySelector(`svg[aria-label^='${title}']`)"
            ".getAttribute('aria-label').split(';')[0].replace(/p50|p95/g, '')))"
        )
    finally:
        over.set()
        thread.join()
    page.locator("svg[aria-label^='Requests, running 0, waiting 0']").wait_for()
    line = page.locator("svg[aria-label^='Requests'] .line").first.get_attribute("d")
    heights = [float(height) for height in re.findall(r" ([\d.]+)", line)]
    assert heights[0] == heights[-1] == max(heights) > min(heights)  # from none to 4, and back
    rows = page.locator("#more tbody tr")
    assert rows.count() == 14
    assert rows.first.locator("th, td").all_text_contents()[::3] == ["Requests: running", "4"]


def test_percentiles_are_those_of_prometheus(page, live):
    """histogram_quantile of what came within the window: linear inside of a bucket."""
    name = "vllm:time_to_first_token_seconds_bucket"
    counts = [{"0.1": 10, "0.5": 10, "+Inf": 10}, {"0.1": 10, "0.5": 18, "+Inf": 20}]
    texts = ["".join(f'{name}{{le="{le}"}} {count}\n' for le, count in one.items()) for one in counts]
    page.goto("about:blank")  # who polls no more
    page.route("**/metrics", lambda route: route.fulfill(body=texts.pop(0) if len(texts) > 1 else texts[0]))
    # 8 of 10 between 0.1 and 0.5: p50 = 0.1 + 0.4 * 5 / 8; p95 lies beyond the last bound.
    page.goto(live.url)
    page.locator("svg[aria-label^='Time to first token, p50 350 ms, p95 500 ms']").wait_for()


# -- how it looks and is used


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_overflows_and_text_has_contrast(page, width, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    ask(page, "hello " + "x" * 300, Max_tokens=20)
    page.locator("article.model button", has_text="Copy").wait_for()
    for view in ("#chat", "#charts"):
        if width == 400:
            page.locator(f"nav a[href='{view}']").click()
        assert page.locator(view).is_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        low = page.locator(view).evaluate(CONTRAST)
        assert low == []


# WCAG's contrast of each text with what is painted behind it, where it is below 4.5.
CONTRAST = """root => {
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const back = node => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color.length && color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of root.querySelectorAll('*')) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const color = node instanceof SVGElement ? style.fill : style.color;
    const [more, less] = [light(rgb(color)), light(back(node))].sort((x, y) => y - x);
    const ratio = (more + .05) / (less + .05);
    if (ratio < 4.5) low.push([node.tagName, node.textContent.slice(0, 20), ratio]);
  }
  return low;
}"""


def test_all_of_it_is_reached_by_keyboard_and_has_a_name(page):
    page.reload()
    page.locator("#model option").first.wait_for(state="attached")
    page.keyboard.press("Tab")
    seen = []
    for _ in range(12):
        seen.append(page.evaluate("() => document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    order = ["model", "temperature", "limit", "key", "clear", "SUMMARY", "log", "prompt", "send"]
    assert [name for name in seen if name in order][: len(order)] == order
    names = page.evaluate(
        "() => [...document.querySelectorAll('input, select, textarea')].map(one =>"
        " one.ariaLabel || one.labels[0]?.textContent.trim()).filter(name => !name)"
    )
    assert names == []
    assert all(page.locator("svg").evaluate_all("all => all.map(one => one.role == 'img' && one.ariaLabel)"))
    ask(page, "hello the world", Max_tokens=3000)
    page.locator("#stop:visible").wait_for()
    page.keyboard.press("Escape")
    page.locator("#send:visible").wait_for()
    assert page.evaluate("() => document.activeElement.id") == "prompt"
