import pytest

from hfaccel.anatomy import anatomy, builtin_ignore
from hfaccel.errors import NoMatch, PatchError
from hfaccel.match import matches, select
from tiny import tiny

NAMES = [
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.10.self_attn.q_proj",
    "lm_head",
]
BUILTIN = ["model.embed_tokens"]


@pytest.mark.parametrize(
    ("pattern", "indices"),
    [
        ("lm_head", [6]),
        ("model.layers.1.self_attn.q_proj", [3]),  # literal: not layer 10
        ("model.layers.*.self_attn.q_proj", [1, 3, 5]),
        ("model.layers.1*.self_attn.*", [3, 5]),
        ("model.layers.?.self_attn.q_proj", []),  # only stars are special
        ("model.layers.*.*_proj", []),  # one star never crosses a dot
        ("model.layers.*.*.*_proj", [1, 2, 3, 4, 5]),
        ("*", [6]),
        ("**", [0, 1, 2, 3, 4, 5, 6]),
        ("**.q_proj", [1, 3, 5]),
        ("**.lm_head", [6]),  # no part at all is fine
        ("model.**.down_proj", [2, 4]),
        ("model.**.embed_tokens", [0]),
        ("model.layers.1.**", [3, 4]),
        ("model.layers.1**", [3, 4, 5]),
        ("**.self_attn.**", [1, 3, 5]),
        ("lm_head.**", [6]),
        ("modelXlayers.0.mlp.down_proj", []),  # a dot is a dot
        ("re:.*\\.(q|k)_proj", [1, 3, 5]),
        ("re:model\\.layers\\.\\d\\..*", [1, 2, 3, 4]),
        ("re:q_proj", []),  # the whole name or nothing
    ],
)
def test_patterns(pattern, indices):
    expected = [NAMES[i] for i in indices]
    assert [name for name in NAMES if matches(pattern, name)] == expected
    if expected:
        assert select(NAMES, [pattern]) == select(NAMES, pattern) == expected
    else:
        with pytest.raises(NoMatch):
            select(NAMES, [pattern])


def test_order_is_that_of_the_names_and_nothing_comes_twice():
    assert select(NAMES, ["lm_head", "**.q_proj", "model.layers.0.**"]) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.10.self_attn.q_proj",
        "lm_head",
    ]


def test_ignore_adds_to_the_builtin_list():
    assert select(NAMES, None, None, BUILTIN) == NAMES[1:]
    assert select(NAMES, None, "**.q_proj", BUILTIN) == [NAMES[2], NAMES[4], "lm_head"]
    assert select(NAMES, "**", ["re:.*layers.*"], BUILTIN) == ["lm_head"]


def test_an_empty_ignore_overrides_the_builtin_list_only_with_explicit_targets():
    assert select(NAMES, "**", (), BUILTIN) == NAMES
    assert select(NAMES, "**", None, BUILTIN) == NAMES[1:]
    assert select(NAMES, None, (), BUILTIN) == NAMES[1:]
    assert select(NAMES, "model.embed_tokens", (), BUILTIN) == ["model.embed_tokens"]


def test_a_target_that_only_means_what_is_left_alone_says_how_to_get_it():
    for ignore in (None, ["lm_head"]):
        with pytest.raises(NoMatch, match=r"'model\.embed\*'.*left alone.*model\.embed_tokens.*ignore=\(\)"):
            select(NAMES, ["lm_head", "model.embed*"], ignore, BUILTIN)
    with pytest.raises(NoMatch, match="targets=\\(\\) selects nothing"):
        select(NAMES, ())


def test_a_builtin_pattern_may_match_nothing():
    assert select(NAMES, "lm_head", None, ["**.router", "re:vision.*"]) == ["lm_head"]


@pytest.mark.parametrize(
    ("targets", "ignore", "message"),
    [
        (
            ["**.q_proj", "q_proj"],
            None,
            r"target 'q_proj' matches nothing.*'\*\*\.q_proj' would match .*0\.self_attn",
        ),
        (
            ["model.layers.1.mlp.up_proj"],
            None,
            r"target .*up_proj'.*closest names are model\.layers\.1\.mlp\.down",
        ),
        (["re:.*k_proj"], None, r"target 're:\.\*k_proj' matches nothing; the closest names are .*q_proj"),
        (None, ["lm_haed"], r"ignore 'lm_haed' matches nothing; the closest names are lm_head"),
        (["**"], ["**.gate"], r"ignore '\*\*\.gate' matches nothing"),
    ],
)
def test_a_pattern_that_matches_nothing_is_named_with_the_closest_names(targets, ignore, message):
    with pytest.raises(NoMatch, match=message):
        select(NAMES, targets, ignore, BUILTIN)


def test_long_lists_are_cut_in_messages():
    names = [f"layers.{i}.q_proj" for i in range(30)]
    with pytest.raises(NoMatch, match="layers.4.q_proj and 25 more"):
        select(names, "q_proj")
    with pytest.raises(NoMatch, match="nothing to choose from"):
        select([], "q_proj")


@pytest.mark.parametrize("pattern", ["re:(", "re:*", "a.***.b", "", 3, None])
def test_malformed_patterns(pattern):
    for arguments in (([pattern],), (None, [pattern])):
        with pytest.raises(PatchError) as error:
            select(NAMES, *arguments)
        assert not isinstance(error.value, NoMatch) and repr(pattern) in str(error.value)


def test_an_adapter_does_not_change_the_name():
    names = ["layers.0.q_proj.base_layer", "layers.0.k_proj", "layers.0.experts.base_layer.down_proj"]
    assert select(names, "layers.0.q_proj") == select(names, "**.q_proj.base_layer") == names[:1]
    with pytest.raises(NoMatch):  # a name of the model's own that only begins alike
        select(["encoder.base_layers.q"], "encoders.q")
    assert select(names, "**.experts.down_proj", ["**.k_proj"]) == names[2:]


def test_names_of_a_model():
    parts = anatomy(tiny("mixtral"))
    left = builtin_ignore(parts)
    assert select(parts.matrices, "**.experts.*", None, left) == [
        f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("gate_up_proj", "down_proj")
    ]
    with pytest.raises(NoMatch, match="ignore="):
        select(parts.matrices, "**.mlp.gate", None, left)
    assert len(select(parts.matrices, "**.mlp.gate", (), left)) == 2
    with pytest.raises(NoMatch):  # a norm is no matrix
        select(parts.matrices, "**.input_layernorm", (), left)
