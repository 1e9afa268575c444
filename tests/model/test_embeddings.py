"""nanokv.embed: the vectors are those of transformers' hidden states, pooled by hand, in any batch and any chunks.

Each family's backbone is saved by transformers, without `model.` before its names, and read from that folder.
"""

import copy
import json
from itertools import repeat

import pytest
import torch
from transformers import AutoModel

import nanokv
from nanokv import embeddings
from nanokv.embeddings import Piece, embed, laid_end_to_end
from nanokv.errors import ContextError, GenerationError, TokenIdsError
from nanokv.fast import optimize
from oracle import SHAPES, gap, random_ids, tiny_reference
from tiny_checkpoint import write_tokenizer
from weights_loader import CheckpointError
from weights_loader.pooling import FLAGS, read_pooling

LENGTHS = (1, 7, 40, 3, 12)
TEXTS = [random_ids(n, 1, n)[0].tolist() for n in LENGTHS]


def by_hand(reference, pooling: str, texts=TEXTS):
    """Each text alone through transformers' backbone, pooled and normalized: (B,C)."""
    rows = []
    for ids in texts:
        with torch.inference_mode():
            hidden = reference(torch.tensor([ids]), use_cache=False).last_hidden_state[0]  # (T,C)
        pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
        rows.append(pooled / pooled.norm())
    return torch.stack(rows)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """both(name) → (transformers' AutoModel, ours) from one folder of one family."""
    made = {}

    def read(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("backbones") / name
            changes = {"vocab_size": 320, "tie_word_embeddings": True}
            tiny_reference(**SHAPES[name] | changes).model.save_pretrained(folder)
            write_tokenizer(folder)
            theirs = AutoModel.from_pretrained(folder, experts_implementation="eager").eval()
            made[name] = theirs, nanokv.load(folder)[0]
        return made[name]

    return read


@pytest.mark.parametrize("name", SHAPES)
def test_the_vectors_are_those_of_transformers(name, both):
    theirs, model = both(name)
    for pooling in ("last", "mean"):
        assert gap(embed(model, TEXTS, pooling), by_hand(theirs, pooling)) <= 1e-6


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("chunk", [1, 5, 16, 63])
def test_any_chunks_and_any_batch_give_the_same_vectors(chunk, pooling, both):
    """A text that is cut, several texts in a forward, and forwards that end where a text does (63 tokens in all)."""
    model = both("G2-tied")[1]
    alone = torch.cat([embed(model, [text], pooling) for text in TEXTS])
    assert gap(embed(model, TEXTS, pooling, chunk=chunk), alone) <= 1e-6
    assert gap(embed(model, TEXTS[::-1], pooling, chunk=chunk), alone.flip(0)) <= 1e-6
    assert sum(map(len, TEXTS)) == 63


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_an_optimized_model_has_nearly_the_same_vectors(weights, both):
    model = both("G2-tied")[1]
    similar = torch.cosine_similarity(embed(optimize(model, weights), TEXTS), embed(model, TEXTS))
    assert similar.min() > {"fp32": 1 - 1e-6, "int8": 0.99}[weights]


def test_fewer_dimensions_are_the_first_ones_normalized_again(both):
    model = both("G2-tied")[1]
    whole = embed(model, TEXTS, normalize=False)
    assert whole.shape == (5, 64) and whole.dtype == torch.float32
    first = whole[:, :10]
    assert gap(embed(model, TEXTS, dimensions=10), first / first.norm(dim=1, keepdim=True)) <= 1e-6
    assert gap(embed(model, TEXTS).norm(dim=1), torch.ones(5)) <= 1e-6


def test_texts_are_laid_end_to_end():
    assert list(laid_end_to_end([3, 4], repeat(5))) == [
        [Piece(0, 0, 3, 3), Piece(1, 0, 2, 4)],
        [Piece(1, 2, 4, 4)],
    ]
    assert [len(pieces) for pieces in laid_end_to_end([5, 5], repeat(5))] == [1, 1]
    each = laid_end_to_end([6, 2], iter([4, 1, 9]))
    assert [(piece.start, piece.end) for pieces in each for piece in pieces] == [
        (0, 4),
        (4, 5),
        (5, 6),
        (0, 2),
    ]


def test_only_the_text_that_goes_on_keeps_its_cache(both, monkeypatch):
    """Keys and values of a text that one forward computes are never put into memory for all its tokens."""
    made = []

    def count(*args, **options):
        made.append((args[0], options))
        return nanokv.make_cache(*args, **options)

    monkeypatch.setattr(embeddings, "make_cache", count)
    embed(both("G2-tied")[1], [[1] * 3, [2] * 20, [3]], chunk=8)
    assert made[1:] == [("dict", {}), ("static", {"capacity": 20}), ("dict", {})]


@pytest.mark.parametrize(
    ("texts", "options", "error", "words"),
    [
        ([[1], []], {}, TokenIdsError, "text 1 has no tokens"),
        ([[1], [320]], {}, TokenIdsError, "id 320 at position 0"),
        ([[1] * 513], {}, ContextError, "text 0 has 513 tokens, the model's context 512"),
        ([], {}, GenerationError, "no texts"),
        ([[1]], {"pooling": "max"}, GenerationError, "'max': last or mean"),
        ([[1]], {"dimensions": 65}, GenerationError, "65: an integer from 1 to 64"),
        ([[1]], {"chunk": 0}, GenerationError, "chunk is 0"),
    ],
)
def test_wrong_arguments(texts, options, error, words, both):
    with pytest.raises(error, match=words):
        embed(both("G2-tied")[1], texts, **options)


def test_weights_with_nan_give_an_error_and_no_vector(both):
    model = copy.deepcopy(both("qwen2-G2")[1])
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(GenerationError, match="NaN"):
        embed(model, TEXTS)


# --- the folder's pooling -----------------------------------------------------------------------------------------


def pooled(folder, fields=None, *modules):
    """A folder with these files of sentence-transformers."""
    if fields is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    if modules:
        steps = [{"idx": i, "type": f"a.package.{name}"} for i, name in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(steps))
    return folder


QWEN3 = dict.fromkeys(FLAGS, False) | {"pooling_mode_lasttoken": True, "include_prompt": True}
STEPS = ("Transformer", "Pooling", "Normalize")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (QWEN3, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"embedding_dimension": 64}, "mean"),  # sentence-transformers' default
        (None, None),
    ],
)
def test_the_pooling_of_a_folder(fields, name, tmp_path):
    assert read_pooling(pooled(tmp_path, fields, *STEPS)) == name


@pytest.mark.parametrize(
    ("fields", "modules", "words"),
    [
        ({"pooling_mode_cls_token": True}, STEPS, 'pooling "cls" is not implemented'),
        (QWEN3 | {"pooling_mode_mean_tokens": True}, STEPS, '"mean\\+lasttoken"'),
        ({"pooling_mode": ["mean", "max"]}, (), '"mean\\+max"'),
        ({"include_prompt": False}, (), "include_prompt false"),
        (QWEN3, (*STEPS, "Dense"), 'module "Dense" is not implemented'),
    ],
)
def test_what_would_change_the_vectors_is_refused(fields, modules, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        read_pooling(pooled(tmp_path, fields, *modules))


@pytest.mark.parametrize("text", ["", "5", '{"a": 1}', "[{}]", '[{"type": 5}]'])
def test_a_broken_list_of_modules(text, tmp_path):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a list of modules"):
        read_pooling(tmp_path)
