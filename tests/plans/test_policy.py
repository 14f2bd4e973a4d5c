"""Policies: what each keeps, how they compose, print and pickle."""

from __future__ import annotations

import pickle

import pytest

from remat import policies
from remat.plans.policy import Candidate, Decision, Policy, as_policy

MATMUL = Candidate("aten.mm.default", ((4, 4), (4, 8), (8, 4)), 64)
SAVED = MATMUL._replace(is_saved=True)
NORM = Candidate("aten.native_layer_norm.default", ((4, 4), (4, 4)), 64, is_saved=True)
NAMED = NORM._replace(name="attn", is_saved=False)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (policies.save_nothing, []),
        (policies.save_everything, [SAVED, NORM]),
        (policies.save_matmuls, [MATMUL, SAVED]),
        (policies.save_attention, []),
        (policies.save_ops("native_layer_norm"), [NORM, NAMED]),
        (policies.save_ops("aten.mm.default"), [MATMUL, SAVED]),
        (policies.save_ops("aten.mm.out"), []),
        (policies.save_below(65), [SAVED, NORM]),
        (policies.save_below("64B"), []),
        (policies.save_names("attn", "mlp"), [NAMED]),
        (policies.save_names("mlp"), []),
        (
            policies.either(policies.save_matmuls, policies.save_names("attn")),
            [MATMUL, SAVED, NAMED],
        ),
        (policies.either(lambda op, shapes, nbytes, name: name == "attn"), [NAMED]),
        (
            as_policy(lambda op, shapes, nbytes, name: shapes[0] == (4, 4) and "mm" in op),
            [MATMUL, SAVED],
        ),
        (as_policy(lambda op, shapes, nbytes, name: Decision.KEEP), [MATMUL, SAVED, NORM, NAMED]),
        (as_policy(lambda op, shapes, nbytes, name: Decision.RECOMPUTE), []),
    ],
)
def test_what_is_kept(policy, kept) -> None:
    candidates = [MATMUL, SAVED, NORM, NAMED]
    assert [c for c in candidates if policy(c) is Decision.KEEP] == kept


READY = [
    policies.save_nothing,
    policies.save_everything,
    policies.save_matmuls,
    policies.save_attention,
    policies.save_ops("mm", "aten.addmm.default"),
    policies.save_below("1MB"),
    policies.save_names("b", "a"),
    policies.either(policies.save_matmuls, policies.save_below(10)),
]


@pytest.mark.parametrize("policy", READY, ids=repr)
def test_a_policy_prints_as_it_is_written_and_survives_pickling(policy) -> None:
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert repr(again) == repr(policy)
    names = {name: getattr(policies, name) for name in policies.__all__}
    assert eval(repr(policy), names) == policy


def test_a_policy_is_returned_as_it_is() -> None:
    assert as_policy(policies.save_matmuls) is policies.save_matmuls


def test_a_name_without_a_dot_is_its_own_base_name() -> None:
    assert policies.save_ops("tanh")(Candidate("tanh", (), 1)) is Decision.KEEP


@pytest.mark.parametrize("bad", ["save_matmuls", 3, None, int])
def test_what_is_no_policy_is_refused(bad) -> None:
    with pytest.raises(TypeError, match=r"one of remat\.policies or a function"):
        as_policy(bad)


def test_a_function_of_other_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match="selective checkpointing"):
        as_policy(lambda op: True)


def test_a_builtin_without_a_signature_is_taken_at_its_word(monkeypatch) -> None:
    def no_signature(function):
        raise ValueError("no signature found")

    monkeypatch.setattr("inspect.signature", no_signature)
    policy = as_policy(lambda op, shapes, nbytes, name: nbytes > 10)
    assert policy(MATMUL) is Decision.KEEP


@pytest.mark.parametrize("names", [(), (1,), ("a", None)])
@pytest.mark.parametrize("make", [policies.save_ops, policies.save_names])
def test_names_are_text(make, names) -> None:
    with pytest.raises(TypeError, match="must be text"):
        make(*names)


def test_either_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one policy"):
        policies.either()


def test_a_policy_without_an_answer_is_not_implemented() -> None:
    with pytest.raises(NotImplementedError):
        Policy()(MATMUL)
