"""Recipes: printing then parsing is the identity, unknown names list the known, every form means the same."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hfaccel
from hfaccel import (
    AWQ,
    FP8,
    GPTQ,
    HQQ,
    NF4,
    RTN,
    Head,
    KVCache,
    LoRASlots,
    PatchConfig,
    PatchError,
    SmoothQuant,
)
from hfaccel.commands.terminal import recipe_names
from hfaccel.errors import UnknownName
from hfaccel.recipe import AUTO, recipe_table
from hfaccel.registry import TRANSFORMS, all_transforms

groups = st.one_of(st.just(-1), st.integers(1, 1 << 20))
grid = {"group": st.none() | groups, "symmetric": st.none() | st.booleans()}
TRANSFORM_STRATEGIES = {
    "int": st.one_of(
        st.builds(RTN, bits=st.sampled_from((8, 4, 3, 2)), **grid, search=st.booleans()),
        st.builds(
            RTN,
            bits=st.sampled_from((8, 4, 3, 2)),
            group=st.just(-1),
            symmetric=st.just(True),
            per_tensor=st.just(True),
        ),
    ),
    "gptq": st.builds(
        GPTQ,
        bits=st.sampled_from((8, 4, 3, 2)),
        **grid,
        order=st.booleans(),
        awq=st.booleans(),
        tuned=st.booleans(),
    ),
    "awq": st.builds(AWQ, bits=st.sampled_from((8, 4, 3, 2)), **grid, clip=st.booleans()),
    "hqq": st.builds(HQQ, bits=st.sampled_from((8, 4, 3, 2)), **grid),
    "nf4": st.builds(NF4, group=st.none() | groups),
    "fp8": st.builds(FP8, format=st.sampled_from(("e4m3", "e5m2")), per_tensor=st.booleans()),
    "w8a8": st.builds(
        SmoothQuant,
        alpha=st.none() | st.just(0.5) | st.integers(0, 1) | st.floats(0, 1),
        static=st.booleans(),
    ),
    "head": st.one_of(st.just(Head(bits=16)), st.builds(Head, bits=st.sampled_from((8, 4)), **grid)),
    "kv": st.just(KVCache(bits=8)),
    "lora": st.builds(LoRASlots, slots=st.integers(1, 999), max_rank=st.integers(1, 999)),
}
configs = st.sets(st.sampled_from(sorted(TRANSFORMS))).flatmap(
    lambda names: st.tuples(*(TRANSFORM_STRATEGIES[name] for name in sorted(names))).flatmap(
        lambda steps: st.permutations(list(steps)).map(lambda mixed: PatchConfig(tuple(mixed)))
    )
)


def test_every_method_is_generated_here():
    assert TRANSFORM_STRATEGIES.keys() == TRANSFORMS.keys()


@settings(max_examples=200, deadline=None)
@given(configs)
def test_printing_then_parsing_is_the_identity(config):
    text = config.to_recipe()
    assert text == text.lower()
    assert PatchConfig.from_recipe(text) == config
    assert PatchConfig.from_recipe(text).to_recipe() == text
    assert config.describe() == text


names = st.lists(st.sampled_from(("**.q_proj", "model.*", "re:.*", "lm_head")), max_size=2).map(tuple)


@settings(max_examples=100, deadline=None)
@given(configs, st.none() | names, st.none() | names)
def test_the_dict_form_survives_json(config, targets, ignore):
    fields = {"targets": targets, "ignore": ignore}
    changed = [type(t).from_dict({**t.to_dict(), **fields}) if t.rounds else t for t in config.transforms]
    config = PatchConfig(tuple(changed))
    assert PatchConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert PatchConfig.of(config.to_dict()) == config


def test_a_file_of_the_dict_form_is_a_recipe(tmp_path):
    config = PatchConfig((GPTQ(bits=3, targets="**.q_proj"), GPTQ(bits=4, targets="**.up_proj"), KVCache()))
    path = tmp_path / "choice.json"
    path.write_text(json.dumps(config.to_dict()))
    assert PatchConfig.of(str(path)) == config and recipe_names(f"int4,{path}") == ["int4", str(path)]
    for text, message in (
        ("[1]", "a config dict is"),
        ("{", "choice.json': Expecting"),
        ('{"transforms": [{"name": "itn"}]}', "unknown transform 'itn'"),
    ):
        path.write_text(text)
        with pytest.raises(PatchError, match=message):
            PatchConfig.of(str(path))
    with pytest.raises(PatchError, match="nowhere.json': .*No such file"):
        PatchConfig.of("nowhere.json")


@pytest.mark.parametrize(
    ("text", "transforms"),
    [
        ("runtime", ()),
        ("int8", (RTN(),)),
        ("int8", (RTN(bits=8, group=-1, symmetric=True),)),
        ("int4", (RTN(bits=4, group=64, symmetric=False),)),
        ("int4-g128-sym", (RTN(bits=4, group=128, symmetric=True),)),
        ("int3-row", (RTN(bits=3, group=-1),)),
        ("int8-tensor", (RTN(per_tensor=True),)),
        ("int8-g32-asym+head16", (RTN(group=32, symmetric=False), Head(bits=16))),
        ("int2+head4+kv8", (RTN(bits=2), Head(bits=4), KVCache(bits=8))),
        ("kv8+int4", (KVCache(), RTN(bits=4))),
        ("w8a8-static-a0.8", (SmoothQuant(alpha=0.8, static=True),)),
    ],
)
def test_what_steps_mean(text, transforms):
    config = PatchConfig.from_recipe(text)
    assert config.transforms == transforms
    assert config.to_recipe() == text
    assert PatchConfig.of(list(transforms)) == config == PatchConfig.of(text) == PatchConfig.of(config)


def test_one_transform_is_a_config():
    assert PatchConfig.of(RTN(bits=4)) == PatchConfig.from_recipe("int4")
    assert PatchConfig.of(RTN(bits=4)) != PatchConfig.from_recipe("int4-sym")


def test_options_in_any_order_and_spaces_around_steps():
    assert PatchConfig.from_recipe("int4-sym-g32") == PatchConfig.from_recipe(" int4-g32-sym ")
    assert PatchConfig.from_recipe("int8 + kv8") == PatchConfig.from_recipe("int8+kv8")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("", "an empty step in the recipe; known are int8"),
        ("int8+", "an empty step"),
        ("int8++kv8", "an empty step"),
        ("itn8", "unknown recipe step 'itn8' \\(did you mean 'int8'\\?\\); known are int8, int4"),
        ("gptq4.5", "unknown recipe step 'gptq4.5' .*; known are int8, .*gptq4, gptq3, gptq2"),
        (
            "int5",
            "unknown recipe step 'int5' \\(did you mean 'int8'\\?\\); known are int8, int4, int3, int2",
        ),
        ("int5-g32", "unknown recipe step 'int5-g32' \\(did you mean"),
        ("int", "known are int8, int4"),
        ("int4.5", "known are int8, int4"),
        ("int8-g", "int8: unknown option -g; known are -gN, -row, -asym, -sym, -tensor"),
        ("int8-g0", "unknown option -g0"),
        ("int8-g-1", "unknown option"),
        ("int8-", "unknown option -;"),
        ("int8-fast", "unknown option -fast"),
        ("int4-g٣", "unknown option"),
        ("int4-g99999999", "group=99999999 is out of range"),
        ("int4-g64-row", "group is given twice"),
        ("int4-sym-asym", "symmetric is given twice"),
        ("int8-g64-tensor", "per_tensor goes with"),
        ("INT8", "lower case"),
        ("nf44", "unknown recipe step 'nf44' \\(did you mean 'nf4'"),
        ("nf4-sym", "nf4: unknown option -sym; known are -gN, -row"),
        ("nf4-g64-row", "group is given twice"),
        ("fp8-e4m3", "unknown option -e4m3; known are -e5m2, -tensor"),
        ("fp8-tensor-tensor", "given twice"),
        ("w8a8-tensor", "unknown option -tensor; known are -static, -nosmooth, -aN"),
        ("w8a8-a", "unknown option -a;"),
        ("w8a8-aN", "lower case"),
        ("w8a8-a1.5", "alpha=1.5; a number between 0 and 1"),
        ("w8a8-a0.2-nosmooth", "alpha is given twice"),
        ("int4-search-search", "search is given twice"),
        ("w8a8-static-static", "given twice"),
        ("head3", "unknown recipe step 'head3' .*head8, head4, head16"),
        ("head16-g64", "known are head16"),
        ("kv4", "unknown recipe step 'kv4' .*kv8"),
        ("kv8-g4", "known is kv8"),
        ("int8+int4", "int is given twice"),
        ("head8+head4", "head is given twice"),
        ("kv8+kv8", "kv is given twice"),
        ("runtime+kv8", "'runtime' means no other step"),
    ],
)
def test_bad_recipes(recipe, message):
    with pytest.raises(PatchError, match=message):
        PatchConfig.from_recipe(recipe)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "a config dict is"),
        ({"transforms": "int8"}, "a config dict is"),
        ({"transforms": [], "extra": 1}, "keys \\['extra', 'transforms'\\]"),
        ({"transforms": ["int8"]}, "needs a 'name'"),
        ({"transforms": [{"bits": 4}]}, "needs a 'name'"),
        (
            {"transforms": [{"name": "itn"}]},
            "unknown transform 'itn'; known are awq, fp8, gptq, head, hqq, int, kv, lora, nf4, w8a8",
        ),
        ({"transforms": [{"name": ["int"]}]}, "unknown transform"),
        ({"transforms": [{"name": "int", "bit": 4}]}, "unknown field 'bit'; known are bits, group"),
        ({"transforms": [{"name": "int", "bits": 7}]}, "bits=7; known are 2, 3, 4, 8"),
    ],
)
def test_bad_dicts(data, message):
    with pytest.raises(PatchError, match=message):
        PatchConfig.from_dict(data)


@pytest.mark.parametrize("config", [3, 4.5, ["int8"], [RTN(), "kv8"], object()])
def test_other_things_are_no_configs(config):
    with pytest.raises(PatchError, match="transform"):
        PatchConfig.of(config)


def test_targets_are_not_sayable_in_a_recipe():
    config = PatchConfig((RTN(targets="lm_head"), RTN(bits=4)))
    with pytest.raises(PatchError, match="a recipe cannot say targets or ignore"):
        config.to_recipe()
    assert config.describe() == "int8(targets=['lm_head'])+int4"
    with pytest.raises(PatchError, match="not a recipe step"):
        PatchConfig((KVCache(bits=None),)).to_recipe()


def test_one_pattern_is_a_list_of_one():
    assert RTN(targets="lm_head") == RTN(targets=["lm_head"]) == RTN(targets=("lm_head",))


def test_transforms_are_frozen_and_keyword_only():
    with pytest.raises(AttributeError):
        RTN().bits = 4
    with pytest.raises(TypeError):
        RTN(4)


def test_the_table_lists_steps_that_parse():
    table = recipe_table()
    assert len({step for step, _ in table}) == len(table)
    assert all(line and len(line) < 100 for _, line in table)
    assert table.pop()[0] == "auto@4.5bpw" and table.pop()[0] == AUTO
    configs = [PatchConfig.from_recipe(step) for step, _ in table]
    assert [config.to_recipe() for config in configs] == [step for step, _ in table]
    assert {type(t) for config in configs for t in config.transforms} == set(all_transforms().values())


@pytest.mark.parametrize("recipe", ["auto", "auto+kv8"])
def test_auto_is_no_list_of_transforms(recipe):
    with pytest.raises(hfaccel.PatchError, match="only a model can be asked"):
        PatchConfig.from_recipe(recipe)


def test_errors_are_value_errors():
    assert issubclass(hfaccel.PatchError, ValueError) and issubclass(UnknownName, hfaccel.PatchError)
