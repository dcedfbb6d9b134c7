"""Models out of GGUF files: every architecture, every type, tied and untied, and what is refused."""

import shutil

import gguf
import pytest
import torch
from gguf import quants
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

import hfaccel
from dequantized import oracle
from gguf_bytes import BY_NAME, File, blocks_of
from hfaccel.errors import PatchError, UnsupportedModel
from hfaccel.formats import gguf_out
from hfaccel.formats.gguf import GGUFModel
from hfaccel.formats.gguf_file import GGUFError, GGUFFile
from hfaccel.formats.gguf_pack import GRIDS
from hfaccel.quant.linear import QuantEmbedding, QuantExperts, QuantLinear
from hfaccel.runtime import plan_reference
from hfaccel.runtime.native import executor
from hfaccel.runtime.plan_build import build
from hfaccel.runtime.plan_reference import Reference
from plans import Steps, close, record_errors
from saved import attention
from tiny import ids, tiny

GEMMA3 = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
FAMILIES = {
    "llama": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32} | GEMMA3,
    "phi3": {},
    "gpt2": {},
    "falcon": {},
    "falcon_mq": {"bias": False},
    "starcoder2": {},
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i / 4 for i in range(8)],
    "original_max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
VARIANTS = {
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
}
CASES = {family: (family, config) for family, config in FAMILIES.items()} | VARIANTS


@torch.no_grad()
def logits(model, prompt):
    return model(prompt).logits


def written(model, path, variant="F32"):
    gguf_out.write(model, None, variant, path, progress=False)
    return path


@pytest.mark.parametrize("family, config", CASES.values(), ids=CASES)
def test_fp32_comes_back_bit_for_bit(family, config, tmp_path):
    model = tiny(family, **config)
    found = hfaccel.from_pretrained(written(model, tmp_path / "m.gguf"), **attention(model))
    assert type(found) is type(model) and found.dtype == torch.float32 and not found.training
    assert not hasattr(found, "_hfaccel")
    state, wanted = found.state_dict(), model.state_dict()
    assert list(state) == list(wanted)
    for name, tensor in wanted.items():
        if tensor.dim() == 1 and family.startswith("gemma"):  # 1 + weight is what the file holds
            assert torch.equal(state[name], (tensor + 1.0) - 1.0), name
        else:
            assert torch.equal(state[name], tensor), name
    prompt = ids(2, 21)
    if family.startswith("gemma"):
        torch.testing.assert_close(logits(found, prompt), logits(model, prompt))
    else:
        assert torch.equal(logits(found, prompt), logits(model, prompt))


def by_the_package(model, path, kind="F32"):
    """A llama or qwen2 with the names of the `gguf` package; rows of a llama's Q and K by its converter's
    rule: per head, (2, half) becomes (half, 2), of keys with the count of key heads."""
    config = model.config
    arch = gguf.MODEL_ARCH[config.model_type.upper()]
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads := config.num_attention_heads)
    writer.add_head_count_kv(kv := config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        for part, count in (("q_proj", heads), ("k_proj", kv)):
            if config.model_type == "llama" and stem.endswith(part):
                shape = tensor.shape
                tensor = tensor.reshape(count, 2, -1, *shape[1:]).transpose(1, 2).reshape(shape)
        kind_of = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        array = tensor.contiguous().numpy()
        writer.add_tensor(
            f"{names.get_name(stem)}.{suffix}", quants.quantize(array, kind_of), raw_dtype=kind_of
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize(
    "family, heads, kv, size",
    [("llama", 8, 2, 8), ("llama", 8, 8, 8), ("llama", 8, 1, 8), ("llama", 9, 3, 32), ("qwen2", 8, 2, 8)],
)
def test_rows_of_queries_and_keys_under_any_head_counts(family, heads, kv, size, kind, tmp_path):
    """CASES G1: the file by the independent package, the oracle its values where transformers has them."""
    config = {"num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": 96}
    hidden = heads * size if family == "qwen2" else 288
    model = tiny(family, hidden_size=hidden, **config, **({"head_dim": size} if family == "llama" else {}))
    found = hfaccel.from_pretrained(by_the_package(model, tmp_path / "m.gguf", kind), **attention(model))
    if kind == "F16":
        assert found.dtype == torch.float16
    rounded = tiny(family, hidden_size=hidden, **config, **({"head_dim": size} if family == "llama" else {}))
    number = gguf.GGMLQuantizationType[kind]
    for parameter in rounded.parameters():
        if parameter.dim() > 1:
            stored = quants.quantize(parameter.detach().numpy(), number)
            parameter.data = torch.from_numpy(quants.dequantize(stored, number).copy())
    for name, module in found.named_modules():
        if "weight" in module._parameters and name:
            weight = (
                module.dequantize() if isinstance(module, QuantLinear | QuantEmbedding) else module.weight
            )
            wanted = rounded.get_parameter(f"{name}.weight")
            assert torch.equal(weight.float(), wanted.to(weight.dtype).float()), name
    if kind == "F32":
        assert torch.equal(logits(found, ids(2, 9)), logits(model, ids(2, 9)))


def test_transformers_own_loader_gives_the_same_model(tmp_path):
    model = tiny("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    written(model, tmp_path / "m.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    ours = hfaccel.from_pretrained(tmp_path, gguf_file="m.gguf")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


# Packed ---------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 512}


def of_blocks(kind, path, *, family="llama", head=None, **config):
    """A file whose matrices are random blocks of one type, norms and biases a random model's; and that model
    with the values of the blocks, as the `gguf` package decodes them."""
    model = tiny(family, **{**(SIZES if family == "llama" else {}), **config})
    written(model, path)
    file = GGUFFile(path)
    number = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(again := path.with_suffix(".again"), file.metadata["general.architecture"])
    for key, value in file.metadata.items():
        if key.startswith(f"{file.metadata['general.architecture']}."):
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
    for seed, (name, info) in enumerate(file.tensors.items()):
        if len(info.shape) == 1 or "ffn_gate_inp" in name or name == "position_embd.weight":
            writer.add_tensor(name, file.rows(name).view(torch.float32).reshape(info.shape).numpy())
            continue
        used = gguf.GGMLQuantizationType[head] if head and name == "output.weight" else number
        block = BY_NAME[used.name]
        k = info.shape[-1]
        small = blocks_of(block, info.bytes // 4 // k * (k // block.size), seed, top=0x1000)
        rows = small.view(*info.shape[:-1], -1).numpy()
        writer.add_tensor(name, rows, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.move(again, path)
    return path


def dense_twin(path, model):
    return GGUFModel(path).load(packed=False, dtype=torch.float32, **attention(model))


def near(found, wanted):
    """As near as rounded inputs allow: a value between two codes may fall to either (tests/runtime)."""
    close(found, wanted, 2e-2)
    assert (found - wanted).abs().mean() < 2e-3 * wanted.abs().mean()


@pytest.mark.parametrize("kind", GRIDS)
def test_every_type_loads_packed_and_runs_in_the_plan(kind, tmp_path):
    path = of_blocks(kind, tmp_path / "m.gguf")
    model = hfaccel.from_pretrained(path)
    dense = dense_twin(path, model)
    assert model.dtype == torch.float32
    packed = [m for m in model.modules() if isinstance(m, QuantLinear | QuantEmbedding)]
    assert len(packed) == 7 * model.config.num_hidden_layers + 2
    assert not any(type(m) in (torch.nn.Linear, torch.nn.Embedding) for m in model.modules())
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | QuantEmbedding):
            assert torch.equal(module.dequantize(), dense.get_submodule(name).weight), name
    prompt = ids(1, 40)[0]
    errors = record_errors(model, prompt[:5])
    assert max(errors.values()) < 1e-5, errors
    steps = Steps(model, executor(model))
    found = steps.run(prompt)[0]
    near(found, logits(oracle(dense, model), prompt[None])[0])
    near(found, Steps(model, Reference(model)).run(prompt)[0])
    assert torch.equal(steps.run(prompt, cuts=[1, 5, 33])[0], found)


def test_the_reference_executor_without_rounded_inputs_is_the_dequantized_model(tmp_path, monkeypatch):
    path = of_blocks("Q4_1", tmp_path / "m.gguf")
    model = hfaccel.from_pretrained(path)
    monkeypatch.setattr(plan_reference, "quantize_activations", unrounded)
    prompt = ids(1, 30)
    found = Steps(model, Reference(model)).run(prompt[0])[0]
    assert (found - logits(dense_twin(path, model), prompt)[0]).abs().max() <= 1e-4


def unrounded(x, layout):
    """Activations as they are, in the form of codes and scales."""
    return x, torch.ones(x.shape[0], len(layout.chunks(x.shape[1])))


@pytest.mark.parametrize("family", ["gpt2", "falcon", "phi3", "gemma2", "qwen2", "mixtral"])
def test_other_families_packed(family, tmp_path):
    config = {"hidden_size": 256, "num_attention_heads": 4}
    config |= {"gpt2": {"n_inner": 512}, "falcon": {"ffn_hidden_size": 512}}.get(
        family, {"intermediate_size": 512, "num_key_value_heads": 2}
    )
    if family == "gemma2":
        config |= {"head_dim": 64, "query_pre_attn_scalar": 64}
    path = of_blocks("Q4_K", tmp_path / "m.gguf", family=family, **config)
    model = hfaccel.from_pretrained(path)
    dense = dense_twin(path, model)
    for name, module in model.named_modules():
        if isinstance(module, QuantExperts):
            for key in module.PROJECTIONS:
                assert torch.equal(module.dequantize(key), getattr(dense.get_submodule(name), key)), name
        elif isinstance(module, QuantLinear | QuantEmbedding):
            weight = dense.get_submodule(name).weight
            weight = (
                weight.T if family == "gpt2" and isinstance(module, QuantLinear) and ".h." in name else weight
            )
            assert torch.equal(module.dequantize(), weight), name
    prompt = ids(1, 20)[0]
    if family != "falcon":  # whose alibi variant keeps the family from the plan's table
        found = Steps(model, executor(model)).run(prompt)[0]
        near(found, Steps(model, Reference(model)).run(prompt)[0])
    assert logits(model, prompt[None]).isfinite().all()


def test_experts_of_two_types_are_dequantized_and_said(tmp_path, caplog):
    config = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
    }
    path = of_blocks("Q4_K", tmp_path / "m.gguf", family="mixtral", **config)
    model = GGUFModel(path)
    down = model.sources["model.layers.0.mlp.experts.down_proj"]
    assert down.infos[0].type.name == "Q4_K"
    down.infos[0] = type(down.infos[0])(
        down.infos[0].name, BY_NAME["Q4_0"], down.infos[0].shape, down.infos[0].start, down.infos[0].bytes
    )
    assert BY_NAME["Q4_0"].bytes * 8 == BY_NAME["Q4_K"].bytes  # the same bytes, read as the other type
    loaded = model.load()
    assert "model.layers.0.mlp.experts: experts of two types are dequantized" in caplog.text
    assert loaded.dtype == torch.bfloat16
    assert [type(layer.mlp.experts).__name__ for layer in loaded.model.layers] == [
        "MixtralExperts",
        "QuantExperts",
    ]


def test_a_packed_model_is_saved_loaded_generated_from_and_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("HFACCEL_STRICT", "1")
    monkeypatch.setenv("HFACCEL_EXECUTOR", "native")
    path = of_blocks("Q4_1", tmp_path / "m.gguf", head="Q8_0")
    model = hfaccel.from_pretrained(path)
    text = str(hfaccel.report(model))
    assert "int4 g32 with minimums" in text and "int8 g32 symmetric" in text and "executor native" in text
    prompt = ids(2, 9)
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False)
    model.save_pretrained(tmp_path / "out")
    again = hfaccel.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again, prompt), logits(model, prompt))
    assert torch.equal(again.generate(prompt, max_new_tokens=6, do_sample=False), tokens)
    assert {type(m) for m in again.modules()} >= {QuantLinear, QuantEmbedding}
    with pytest.raises(PatchError, match="no originals"):
        hfaccel.unpatch(model)


def test_recipes_of_the_runtime_keep_weights_packed_others_do_not(tmp_path):
    path = of_blocks("Q4_0", tmp_path / "m.gguf")
    model = hfaccel.from_pretrained(path, "kv8")
    assert model._hfaccel.config.to_recipe() == "kv8"
    assert {m.layout.group for m in model.modules() if isinstance(m, QuantLinear)} == {32}
    dense = hfaccel.from_pretrained(path, "int8", dtype=torch.float32)
    assert {m.layout.bits for m in dense.modules() if isinstance(m, QuantLinear)} == {8}
    assert {m.layout.group for m in dense.modules() if isinstance(m, QuantLinear)} == {-1}


def test_adapters_lie_beside_packed_blocks_and_are_not_merged_into_them(tmp_path):
    peft = pytest.importorskip("peft")
    model = hfaccel.from_pretrained(of_blocks("Q4_K", tmp_path / "m.gguf"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    before = logits(model, ids(1, 5))
    adapted = peft.get_peft_model(model, config)
    assert not torch.equal(logits(adapted, ids(1, 5)), before)
    with pytest.raises(PatchError, match="cannot be merged into int4 g32 with minimums"):
        adapted.merge_adapter()


# Tied heads and bf16 (CASES G4) ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("stored", [False, True])
def test_tied_stays_tied_whether_the_head_is_stored_again_or_not(kind, stored, tmp_path):
    path = tmp_path / "m.gguf"
    if kind == "F32":
        written(tiny("llama", tie_word_embeddings=True), path)
    else:
        of_blocks(kind, path, tie_word_embeddings=True)
    if stored:
        with_head(path, lambda rows: rows)
    model = hfaccel.from_pretrained(path)
    assert model.config.tie_word_embeddings
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    assert ends[0].weight.data_ptr() == ends[1].weight.data_ptr()
    packed = kind != "F32"
    assert packed == isinstance(ends[0], QuantEmbedding) == isinstance(ends[1], QuantLinear)
    if packed:
        assert ends[0].weight_scale.data_ptr() == ends[1].weight_scale.data_ptr()
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(hfaccel.from_pretrained(tmp_path / "out"), ids(1, 5)), logits(model, ids(1, 5)))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_another_head_is_kept_and_the_config_says_so(kind, tmp_path):
    path = tmp_path / "m.gguf"
    if kind == "F32":
        written(tiny("llama", tie_word_embeddings=True), path)
    else:
        of_blocks(kind, path, tie_word_embeddings=True)
    with_head(path, lambda rows: rows.flip(0))
    model = hfaccel.from_pretrained(path)
    assert not model.config.tie_word_embeddings
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if kind == "F32":
        assert torch.equal(head.weight, table.weight.flip(0))
    else:
        assert torch.equal(head.dequantize(), table.dequantize().flip(0))


def with_head(path, change):
    """The file with the embedding's rows, changed, as its head."""
    file, writer = GGUFFile(path), gguf.GGUFWriter(path.with_suffix(".again"), "llama")
    for key, value in file.metadata.items():
        if key.startswith("llama."):
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
                key, value
            )
    for name, info in file.tensors.items():
        rows = file.rows(name)
        entries = [(name, rows)] + [("output.weight", change(rows))] * (name == "token_embd.weight")
        for entry, found in entries:
            number = gguf.GGMLQuantizationType(info.type.number)
            shape = (*info.shape[:-1], found.shape[-1])
            writer.add_tensor(entry, found.numpy().reshape(shape), raw_shape=shape, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.move(path.with_suffix(".again"), path)


def test_bfloat16_is_bit_identical(tmp_path):
    model = tiny("llama").bfloat16()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, :4] = torch.tensor([1e-39, 7e4, -0.0, -1e-39])
    found = hfaccel.from_pretrained(written(model, tmp_path / "m.gguf", "BF16"))
    assert found.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name].view(torch.int16), tensor.view(torch.int16)), name


# What is refused --------------------------------------------------------------------------------------------


def rewritten(path, metadata=None, drop=(), rename=None):
    """The llama in `path` with other metadata, without tensors or with other names of some."""
    file = GGUFFile(path)
    out = File(alignment=32)
    out.metadata = [(k, v) for k, v in (file.metadata | (metadata or {})).items() if v is not None]
    from gguf_bytes import Tensor

    for name, info in file.tensors.items():
        if name not in drop:
            data = file.rows(name).numpy().tobytes()
            out.tensors.append(Tensor((rename or {}).get(name, name), info.shape, info.type.number, data))
    target = path.with_name("changed.gguf")
    target.write_bytes(out.bytes())
    return target


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    return written(
        tiny("llama", hidden_size=32, intermediate_size=64, vocab_size=64, num_attention_heads=2), path
    )


BAD = {
    "architecture": (
        {"general.architecture": "mamba"},
        UnsupportedModel,
        "'mamba'; known are falcon, gemma2",
    ),
    "no architecture": ({"general.architecture": None}, UnsupportedModel, "None; known are"),
    "architecture of another type": ({"general.architecture": 3}, UnsupportedModel, "is 3; known"),
    "missing key": ({"llama.block_count": None}, GGUFError, "llama.block_count is missing"),
    "more blocks": ({"llama.block_count": 3}, GGUFError, "llama.block_count is 3, tensor blk.2.attn_norm"),
    "absurd blocks": ({"llama.block_count": 2**31 - 1}, GGUFError, "llama.block_count is 2147483647, tensor"),
    "fewer blocks": ({"llama.block_count": 1}, GGUFError, "tensor blk.1.* and 8 others: not one that"),
    "no heads": ({"llama.attention.head_count": 0}, GGUFError, "llama.attention.head_count is 0"),
    "heads as a list": ({"llama.attention.head_count": [2, 2]}, GGUFError, "head_count is 2 values"),
    "heads as text": ({"llama.attention.head_count": "2"}, GGUFError, "head_count is '2'"),
    "other heads": ({"llama.attention.head_count": 4}, GGUFError, "tensor blk.0.attn_q.weight is"),
    "other width": ({"llama.embedding_length": 64}, GGUFError, "tensor token_embd.weight is"),
    "absurd width": ({"llama.embedding_length": 2**31 - 2}, GGUFError, "tensor .* is"),
    "absurd head": (
        {"llama.attention.key_length": 2**30, "llama.attention.value_length": 2**30},
        (GGUFError, UnsupportedModel),
        "key_length|rope.dimension_count|tensor",
    ),
    "heads that do not divide": (
        {"llama.attention.head_count": 3},
        GGUFError,
        "llama cannot be made of its metadata: .*not a multiple of the number of attention heads",
    ),
    "odd head": (
        {f"llama.{key}": 15 for key in ("attention.key_length", "attention.value_length")}
        | {"llama.rope.dimension_count": 15},
        UnsupportedModel,
        "heads of size 15: rotary positions want an even one",
    ),
    "absurd heads of absurd size": (
        {f"llama.{key}": 2**30 for key in ("attention.key_length", "attention.value_length")}
        | {"llama.rope.dimension_count": 2**30, "llama.attention.head_count": 16},
        GGUFError,
        "tensor blk.0.attn_q.weight is",
    ),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, GGUFError, "rms_epsilon is nan"),
    "theta": ({"llama.rope.freq_base": float("inf")}, GGUFError, "freq_base is inf"),
    "rope type": ({"llama.rope.scaling.type": "spiral"}, UnsupportedModel, "scaling.type is 'spiral'"),
    "one of several": ({"split.count": 3}, GGUFError, "split.count: one of several files"),
    "token id": ({"tokenizer.ggml.eos_token_id": "2"}, GGUFError, "eos_token_id is '2'"),
}


@pytest.mark.parametrize("metadata, error, words", BAD.values(), ids=BAD)
def test_metadata_that_is_wrong_is_named(sound, metadata, error, words):
    with pytest.raises(error, match=f"changed.gguf: .*({words})"):
        hfaccel.from_pretrained(rewritten(sound, metadata))


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"])
def test_a_missing_tensor_is_named_and_nothing_is_drawn_at_random(sound, name):
    with pytest.raises(GGUFError, match=f"changed.gguf: tensor {name} is missing"):
        hfaccel.from_pretrained(rewritten(sound, drop=(name,)))


def test_a_missing_head_means_a_tied_one(sound):
    model = hfaccel.from_pretrained(rewritten(sound, drop=("output.weight",)))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tensor_that_the_model_has_not_is_named(sound):
    with pytest.raises(GGUFError, match="tensor blk.0.attn_q.lora: not one that a llama has"):
        hfaccel.from_pretrained(rewritten(sound, rename={"blk.0.attn_q.weight": "blk.0.attn_q.lora"}))


@pytest.mark.parametrize(
    "kwargs, words",
    [({"dtype": "int8"}, "'int8'"), ({"config": LlamaForCausalLM}, "config=: m.gguf says itself")],
)
def test_arguments_that_do_not_fit(sound, kwargs, words):
    with pytest.raises(PatchError, match=words):
        hfaccel.from_pretrained(sound, **kwargs)


def test_a_gpt2_with_an_absurd_context_allocates_nothing(tmp_path):
    path = written(tiny("gpt2"), tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match="tensor position_embd.weight is"):
        hfaccel.from_pretrained(rewritten(path, {"gpt2.context_length": 2**30}))
    assert type(hfaccel.from_pretrained(path)) is GPT2LMHeadModel


def test_a_plan_of_a_loaded_model_is_that_of_a_patched_one(tmp_path):
    plan = build(hfaccel.from_pretrained(of_blocks("Q4_1", tmp_path / "m.gguf")))
    assert sum(type(op).__name__ == "Matmul" for op in plan.ops) >= 5
