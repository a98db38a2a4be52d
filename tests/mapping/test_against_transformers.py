"""The catalogues against the models that transformers builds: the same names, the same shapes, the same ties.

Every family on disk is built from the tiny configs by its model_type, on the meta device (no memory, no values).
"""

from __future__ import annotations

from typing import Any

import pytest
from tiny_configs import tiny_configs

from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import load_tables

pytestmark = pytest.mark.frameworks
TABLES = load_tables()


@pytest.mark.parametrize("family", TABLES.families())
def test_names_and_shapes_are_those_of_the_real_model(family: str) -> None:
    entry = TABLES.family(family)
    for label, config in tiny_configs(entry):
        for tied in (False, True):
            rules = resolve(entry, {**config, "tie_word_embeddings": tied}, "hf")
            expected = {rule.target: rule.expr.shape for rule in rules.rules}
            model = _model({**config, "tie_word_embeddings": tied})
            found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            assert found == expected, f"{family}, {label}"
            twins = {tie.hf for tie in rules.ties} if rules.tied else set()
            assert twins == ({"lm_head.weight"} if tied else set())


def test_a_catalogue_with_a_wrong_shape_would_be_noticed() -> None:
    """The broken control: another head size in config.json is another model."""
    entry = TABLES.family("llama")
    _, config = next(tiny_configs(entry))
    rules = resolve(entry, {**config, "head_dim": 8}, "hf")
    found = {name: tuple(tensor.shape) for name, tensor in _model(config).state_dict().items()}
    assert found != {rule.target: rule.expr.shape for rule in rules.rules}


def _model(config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
