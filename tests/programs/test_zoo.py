"""A quick part of the zoo: one model of each family trains partitioned as it does unsharded."""

import pytest

import ranks

pytest.importorskip("transformers")

import zoo

FAMILIES = ["gpt2", "bert", "vit", "lstm", "convnet"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_the_zoo_trains_as_unsharded(name: str) -> None:
    for result in ranks.run(2, zoo.compare, name, 2, False):
        assert result.complaints() == []
        assert result.buckets
        assert result.graphs >= 2
