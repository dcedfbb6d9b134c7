"""transformers.Trainer: adapters on packed models train, codes alone do not, `runtime` changes nothing."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hfaccel
from hfaccel.quant.linear import QuantLinear
from tiny import ids, tiny

peft = pytest.importorskip("peft")


def trainer(model, folder, steps=8, **arguments):
    x = ids(8, 12)
    arguments = {
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        "use_cpu": True,
    } | arguments
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=[{"input_ids": row, "labels": row} for row in x],
    )


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.fixture(autouse=True)
def spill(tmp_path, monkeypatch):
    monkeypatch.setenv("HFACCEL_SPILL_DIR", str(tmp_path / "spill"))


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        ("int4", {}),
        ("int8", {"gradient_checkpointing": True}),
        ("int4", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("int4", {"bf16": True}),
    ],
)
def test_adapters_train(tmp_path, recipe, arguments):
    model = hfaccel.patch(tiny("TL"), recipe)
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    codes = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.clone()
    run = trainer(model, tmp_path, **arguments)
    run.train()
    assert losses(run)[-1] < 0.8 * losses(run)[0], losses(run)
    assert torch.equal(model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight, codes)
    model.eval()
    assert model.generate(input_ids=ids(1, 4), max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (
        1,
        7,
    )


def test_an_adapter_is_saved_and_comes_back(tmp_path):
    model = hfaccel.patch(tiny("TL"), "int4")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    run = trainer(peft.get_peft_model(model, config), tmp_path, save_strategy="steps", save_steps=8)
    run.train()
    run.model.eval()
    with torch.no_grad():
        wanted = run.model(input_ids=ids(2, 6)).logits
    folder = tmp_path / "checkpoint-8"
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(hfaccel.patch(tiny("TL"), "int4"), folder)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids(2, 6)).logits, wanted)


def test_a_quantized_model_alone_is_refused_by_transformers(tmp_path):
    for recipe in ("int8", "int4", "head8"):
        model = hfaccel.patch(tiny("TL"), recipe)
        with pytest.raises(ValueError, match="fine-tuning on purely quantized models"):
            trainer(model, tmp_path)
        hfaccel.unpatch(model)
        trainer(model, tmp_path)


def test_a_runtime_patch_trains(tmp_path):
    model, twin = tiny("TL"), tiny("TL")
    hfaccel.patch(model, "runtime")
    run, plain = trainer(model, tmp_path / "a"), trainer(twin, tmp_path / "b")
    run.train(), plain.train()
    assert losses(run) == losses(plain) and losses(run)[-1] < 0.5 * losses(run)[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
