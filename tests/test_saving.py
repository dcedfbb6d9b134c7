"""save_pretrained of a patched model: whole or not at all, over what is there, with a card, no adapters."""

import errno
import os
import resource
import signal
import stat
import sys
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hfaccel
from hfaccel import saving
from hfaccel.errors import PatchError
from saved import attention, config_json, logits, patched, reload, stored
from tiny import ids, tiny

WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def killed_at(step: int, save) -> bool:
    """Run `save` in a child, killed before its `step`-th change of the disk; whether it came so far."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        left = step

        def count(event: str, args: tuple) -> None:
            nonlocal left
            writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if event in WRITES or writes:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            save()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("before", [None, "int8", "plain"])
def test_killed_at_any_moment(before, tmp_path):
    """What is left loads as the old model, as the new one, or not at all."""
    new = patched(tiny("TL", seed=1), "int4")
    old = tiny("TL", seed=2)
    if before == "int8":
        patched(old, "int8")
    shards = {"max_shard_size": "100KB"} if before == "plain" else {}
    found = set()
    for step in range(100):
        target = tmp_path / f"{step}" / "model"
        if before is not None:
            old.save_pretrained(target, **({} if shards else {"max_shard_size": "32KB"}))
        killed = killed_at(step, lambda: new.save_pretrained(target, **shards))  # noqa: B023, runs at once
        try:
            loaded = AutoModelForCausalLM.from_pretrained(target, **attention(new))
        except (OSError, ValueError):
            found.add("refused")
        else:
            is_new = torch.equal(logits(loaded), logits(new))
            assert is_new or (before is not None and torch.equal(logits(loaded), logits(old))), step
            found.add("new" if is_new else "old")
        if not killed:
            assert is_new and step > 3
            break
    assert found == ({"old", "refused", "new"} if before else {"refused", "new"})


@pytest.mark.parametrize("exists", [False, True])
def test_the_next_save_removes_what_a_killed_one_left(exists, tmp_path):
    """And nothing of one that is at work, that is new, or that only looks alike."""
    target = tmp_path / "mo@d.el"
    place = target if exists else tmp_path
    place.mkdir(exist_ok=True)
    model = hfaccel.patch(tiny("llama"), "int8", progress=False)
    assert killed_at(3, lambda: model.save_pretrained(target))
    (left,) = place.glob(".*.saving")
    new, alike = left.with_name(left.name.replace("mo@d", "mo@d.mo@d")), left.with_name(f"{left.name}.mine")
    working = left.with_name(f".{target.name}.{'0' * 12}.saving")
    for path in (new, alike, working):
        path.mkdir()
    held = saving._locked(working)
    saving._sweep(place, target.name)
    assert left.exists()  # all are new
    for path in (left, new, alike, working):
        os.utime(path, (1, 1))
    (fresh := left.with_name(f".{target.name}.{'1' * 12}.saving")).mkdir()
    model.save_pretrained(target)
    assert sorted(place.glob(".*saving*")) == sorted([new, alike, working, fresh])
    os.close(held)
    assert AutoModelForCausalLM.from_pretrained(target, **attention(model)) is not None


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    model = patched(tiny("TL"), "int4")
    model.save_pretrained(tmp_path / "out")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    for name in ("out", "other"):
        with pytest.raises(OSError, match=f"{name} cannot be saved: no space left"):
            model.save_pretrained(tmp_path / name)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    assert os.listdir(tmp_path) == ["out"]


def on_a_small_disk(limit_bytes: int, save) -> str:
    """What `save` raises in a child in which no file can grow past a limit, as on a full disk."""
    into, out = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        try:
            save()
        except Exception as error:
            os.write(out, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(out)
    os.waitpid(child, 0)
    with open(into) as said:
        return said.read()


@pytest.mark.parametrize(
    "limit_bytes", [0, 2000, 40_000]
)  # of the config, of the weights' header, of weights
@pytest.mark.parametrize("before", [False, True])
def test_a_full_disk(limit_bytes, before, tmp_path):
    model, old = patched(tiny("TL", seed=1), "int4"), patched(tiny("TL", seed=2), "int8")
    if before:
        old.save_pretrained(tmp_path / "out")
    said = on_a_small_disk(limit_bytes, lambda: model.save_pretrained(tmp_path / "out"))
    assert said.startswith("OSError: ") and f"{tmp_path / 'out'} cannot be saved: " in said
    assert "File too large" in said
    assert os.listdir(tmp_path) == (["out"] if before else [])
    if before:
        assert torch.equal(logits(reload(old, tmp_path / "out")), logits(old))


def test_over_another_models_folder(tmp_path):
    tiny("TL", seed=2).save_pretrained(tmp_path, max_shard_size="32KB")
    for name in ("pytorch_model.bin", "tokenizer.json", "model-notes.txt", "model.fp16.safetensors"):
        (tmp_path / name).write_text("{}")
    model = patched(tiny("TL"), "int4")
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
        "tokenizer.json",
        "model-notes.txt",
        "model.fp16.safetensors",
    }
    model.save_pretrained(tmp_path, max_shard_size="32KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(reload(model, tmp_path)), logits(model))


def test_a_new_folder_has_the_usual_permissions(tmp_path):
    patched(tiny("TL"), "int4").save_pretrained(tmp_path / "a" / "b")
    (tmp_path / "c").mkdir()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a/b", "c")]
    assert modes[0] == modes[1]


def test_over_the_folder_the_model_came_from(tmp_path):
    original = tiny("TL", tie_word_embeddings=True)
    original.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **attention(original))
    patched(model, "int4")
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(model, tmp_path)), logits(model))
    with hfaccel.original(model):
        assert torch.equal(logits(model), logits(original))
        with pytest.raises(PatchError, match=r"inside original\(model\)"):
            model.save_pretrained(tmp_path)
    hfaccel.unpatch(model)
    assert torch.equal(logits(model), logits(original))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_what_cannot_be_saved_into(tmp_path):
    (tmp_path / "file").write_text("")
    model = patched(tiny("TL"), "int4")
    with pytest.raises(PatchError, match="file is a file"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(PatchError, match="file is a file"):
        model.save_pretrained(tmp_path / "file" / "below")
    with pytest.raises(PatchError, match="an empty path"):
        model.save_pretrained("")


def test_the_card(tmp_path):
    model = patched(tiny("TL"), "int4")
    model.save_pretrained(tmp_path / "a")
    card = (tmp_path / "a" / "README.md").read_text()
    assert "library_name: transformers" in card and "import hfaccel" in card and "`int4`" in card
    code = card.partition("```python")[2].partition("```")[0].replace('"a"', repr(str(tmp_path / "a")))
    namespace = {}
    exec(code, namespace)
    loaded = namespace["model"].state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nText.\n")
    model.save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text((tmp_path / "b" / "README.md").read_text() + "\nMore.\n")
    patched(tiny("TL"), "int8").save_pretrained(tmp_path / "b")
    card = (tmp_path / "b" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n# Mine\n\nText.\n\n<!-- hfaccel -->") and "More." in card
    assert card.count("import hfaccel") == 1 and "`int8`" in card and "`int4`" not in card


@pytest.mark.parametrize("recipe", ["runtime", "kv8"])
def test_runtime_choices_are_a_plain_folder(recipe, tmp_path):
    original = tiny("TL", tie_word_embeddings=True)
    expected = logits(original)
    model = patched(tiny("TL", tie_word_embeddings=True), recipe)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()
    config = config_json(tmp_path)
    assert "quantization_config" not in config and config["hfaccel"]["format"] == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **attention(original))
    assert type(loaded) is type(original) and not hasattr(loaded, "_hfaccel")
    assert torch.equal(logits(loaded), expected)
    ours = hfaccel.from_pretrained(tmp_path, **attention(original))
    assert ours._hfaccel.config == model._hfaccel.config
    hfaccel.unpatch(ours)
    assert torch.equal(logits(ours), expected)


def test_the_base_of_an_adapter(tmp_path):
    """Packed below an adapter, or wrapped by one later: the base comes back without it."""
    plain = patched(tiny("TL", tie_word_embeddings=True), "int4")
    plain.save_pretrained(tmp_path / "plain")
    config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    before = get_peft_model(tiny("TL", tie_word_embeddings=True), config)
    patched(before, "int4")
    after = get_peft_model(patched(tiny("TL", tie_word_embeddings=True), "int4"), config)
    for name, model in {"before": before, "after": after}.items():
        model.get_base_model().save_pretrained(tmp_path / name)
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
        model.save_pretrained(tmp_path / f"{name}-adapter")
        assert sorted(path.name for path in (tmp_path / f"{name}-adapter").iterdir()) == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        ]


def test_a_module_saved_beside_the_adapter_is_not_the_base(tmp_path):
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"])
    model = get_peft_model(patched(tiny("TL"), "int4"), config)
    with torch.no_grad():
        model.get_base_model().model.norm.modules_to_save["default"].weight.zero_()
    model.get_base_model().save_pretrained(tmp_path)
    plain = patched(tiny("TL"), "int4")
    assert torch.equal(logits(reload(plain, tmp_path)), logits(plain))


def test_arguments_of_transformers(tmp_path):
    model = patched(tiny("TL"), "int4")
    model.save_pretrained(tmp_path / "a", is_main_process=False)
    assert not list((tmp_path / "a").iterdir())
    model.save_pretrained(tmp_path / "a", state_dict={name: t + 1 for name, t in model.state_dict().items()})
    assert torch.equal(logits(reload(model, tmp_path / "a")), logits(model))
    model.save_pretrained(tmp_path / "b", variant="fp16")
    assert (tmp_path / "b" / "model.fp16.safetensors").exists()
    assert torch.equal(logits(reload(model, tmp_path / "b", variant="fp16")), logits(model))
    model.save_pretrained(tmp_path / "c", True, None, False, "32KB")
    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 4


def test_push_to_hub_saves_here_first(tmp_path, monkeypatch):
    model, pushed = patched(tiny("TL"), "int4"), []
    monkeypatch.setattr(
        transformers.LlamaForCausalLM,
        "push_to_hub",
        lambda self, repository, **kwargs: pushed.append((repository, kwargs)),
    )
    model.save_pretrained(tmp_path / "out", push_to_hub=True, commit_message="first")
    assert pushed == [("out", {"commit_message": "first", "max_shard_size": "50GB"})]
    assert set(stored(tmp_path / "out")) == set(model.state_dict())


def test_a_symbolic_link_stays_one(tmp_path):
    model = patched(tiny("TL"), "int4")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").is_file()


def test_trained_layers_are_saved_as_they_are_now(tmp_path):
    model = patched(tiny("TL"), "int4")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(model, tmp_path)), logits(model))


@pytest.mark.parametrize("recipe", ["kv8", "int8"])
def test_the_config_says_tied_exactly_while_the_tensors_are_one(recipe, tmp_path):
    """As after an adapter on the head alone was merged, and taken out again."""
    model = patched(tiny("TL", tie_word_embeddings=True), recipe)
    shared, other = model.lm_head.weight, patched(tiny("TL", seed=3), recipe).lm_head.weight
    for tied, weight in {"one": shared, "two": other, "again": shared}.items():
        model.lm_head.weight = weight
        model.save_pretrained(tmp_path)
        assert config_json(tmp_path)["tie_word_embeddings"] == (tied != "two")
        assert ("lm_head.weight" in stored(tmp_path)) == (tied == "two")
        loaded = reload(model, tmp_path)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (tied != "two")
        assert torch.equal(logits(loaded), logits(model))


def test_replacing_takes_files_and_leaves_the_rest(tmp_path):
    target = tmp_path / "out"
    with saving.replacing(target) as folder:
        assert folder.parent == target.parent and not target.exists()
        (folder / "a").write_text("1")
    with saving.replacing(target) as folder:
        (folder / "b").write_text("2")
    assert {path.name: path.read_text() for path in target.iterdir()} == {"a": "1", "b": "2"}
    assert [path.name for path in Path(tmp_path).iterdir()] == ["out"]


def test_into_a_folder_whose_parent_is_another_disk(tmp_path, monkeypatch):
    """A mounted folder: nothing can be renamed into it from beside it."""
    mount, rename, replace = tmp_path / "mount", os.rename, os.replace
    mount.mkdir()

    def on_one_disk(move):
        def moved(source, target):
            if Path(source).is_relative_to(mount) != Path(target).is_relative_to(mount):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            move(source, target)

        return moved

    monkeypatch.setattr(os, "rename", on_one_disk(rename))
    monkeypatch.setattr(os, "replace", on_one_disk(replace))
    model = patched(tiny("TL"), "int4")
    for _ in range(2):
        model.save_pretrained(mount)
        assert not list(mount.glob(".*")) and os.listdir(tmp_path) == ["mount"]
        assert torch.equal(logits(reload(model, mount)), logits(model))


def test_generation_goes_on_after_saving(tmp_path):
    model = patched(tiny("TL"), "int4+kv8")
    prompt = ids(1, 6)
    before = model.generate(prompt, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), before)


def test_a_save_cut_off_is_refused_by_the_model_class_too(tmp_path, monkeypatch):
    """A class whose folder has no config would make random weights of its default sizes."""
    model = patched(tiny("TL"), "int8")
    model.save_pretrained(tmp_path)
    replace = os.replace

    def die_at_the_weights(source, target):
        if str(target).endswith(".safetensors"):
            raise OSError("the disk is gone")
        replace(source, target)

    monkeypatch.setattr(os, "replace", die_at_the_weights)
    with pytest.raises(OSError, match="the disk is gone"):
        model.save_pretrained(tmp_path)
    monkeypatch.undo()
    for load in (
        LlamaForCausalLM.from_pretrained,
        AutoModelForCausalLM.from_pretrained,
        hfaccel.from_pretrained,
    ):
        with pytest.raises((OSError, ValueError)):
            load(tmp_path)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(model, tmp_path)), logits(model))
