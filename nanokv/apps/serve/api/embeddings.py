"""Requests to /v1/embeddings: the fields, the work for the engine's thread, and the answer."""

import base64
import json
import logging
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from torch import Tensor

from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.fields import (
    Between,
    Checked,
    Expected,
    Fields,
    Nothing,
    Text,
    YesNo,
    read,
)
from nanokv.apps.serve.api.prompts import Served, source_ids
from nanokv.apps.serve.api.protocol import note_unknown
from nanokv.apps.serve.api.requests import each_source, sources
from nanokv.checkpoint import Model
from nanokv.embeddings import embed_steps

logger = logging.getLogger(__name__)
MOST_INPUTS = 2_048  # per request, as at OpenAI
MOST_TOKENS = 300_000  # of all inputs of a request, as at OpenAI
LARGEST = 1_000_000  # dimensions; the model's own number is the limit
IN_TEXT = "instructions are part of the text of an input"


class EmbeddingRequest(Fields):
    """The body of /v1/embeddings: a text, token ids, or a list of them."""

    model: Text = None
    input: Annotated[
        list,
        Checked(
            lambda value: each_source(value, "input", MOST_INPUTS),
            sources(MOST_INPUTS),
            needed=True,
        ),
    ]
    encoding_format: Annotated[Literal["float", "base64"] | None, Expected("float or base64")] = (
        None
    )
    dimensions: Annotated[int | None, Between(1, LARGEST)] = None
    """Only the first values of each vector, which is then normalized again."""
    add_special_tokens: YesNo = None
    user: Any = None
    # Fields of other servers that would change the vectors.
    truncate: Annotated[Any, Nothing(False)] = None
    truncate_prompt_tokens: Annotated[Any, Nothing()] = None
    normalize: Annotated[Any, Nothing(True)] = None
    embd_normalize: Annotated[Any, Nothing(2)] = None
    input_type: Annotated[Any, Nothing(hint=IN_TEXT)] = None
    prompt_name: Annotated[Any, Nothing(hint=IN_TEXT)] = None


class Embedding:
    """The vectors of one request. The engine's thread computes them; then they are `written`."""

    def __init__(
        self, model: str, request: EmbeddingRequest, inputs: list[list[int]], pooling: str
    ):
        self.model = model
        self.inputs = inputs
        self.tokens = sum(map(len, inputs))
        self.computed = 0  # tokens so far
        self.base64 = request.encoding_format == "base64"
        self._settings: dict[str, Any] = {"pooling": pooling, "dimensions": request.dimensions}
        self._vectors: list[Tensor] = []
        self._chunk = 1  # the most tokens of the next forward
        self._rest: Iterator[list[Tensor]] | None = None

    def advance(self, model: Model, chunk: int) -> bool:
        """Run the next forward, of at most `chunk` tokens; True once all vectors are computed."""
        self._chunk = chunk
        if self._rest is None:
            self._rest = embed_steps(model, self.inputs, self._chunks(), **self._settings)
        self._vectors += [vector.cpu() for vector in next(self._rest)]
        self.computed = min(self.tokens, self.computed + chunk)
        return len(self._vectors) == len(self.inputs)

    def _chunks(self) -> Iterator[int]:
        """The size of each forward. The next one is drawn when the forward before it is done."""
        while True:
            yield self._chunk

    def written(self) -> bytes:
        """The body of the response.

        It can have 40 MB. JSON is written vector by vector, because other threads wait meanwhile.
        """
        data = ", ".join(map(self._entry, range(len(self.inputs))))
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        rest = json.dumps({"model": self.model, "usage": usage})[1:]
        return f'{{"object": "list", "data": [{data}], {rest}'.encode()

    def _entry(self, index: int) -> str:
        values = self._vectors[index].tolist()
        embedding: str | list[float] = values
        if self.base64:  # fp32, little-endian
            embedding = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        return json.dumps({"object": "embedding", "index": index, "embedding": embedding})


def prepare(served: Served, fields: dict) -> Embedding:
    """A request, ready for the engine's thread."""
    request = read(EmbeddingRequest, fields)
    note_unknown(fields, EmbeddingRequest)
    model = served.name(request.model)
    if served.pooling is None:
        raise ApiError(
            400,
            f"{model} is served for answers, not for embeddings",
            "model",
            "unsupported",
            hint="nanokv serve --embeddings last, or mean",
        )
    check_dimensions(served, request.dimensions)
    special = request.add_special_tokens is not False
    inputs: list[list[int]] = []
    total = 0
    for number, source in enumerate(request.input):
        param = "input"
        if len(request.input) > 1:
            param = f"input[{number}]"
        ids = source_ids(served, source, param, special)
        total += len(ids)
        if total > MOST_TOKENS:
            raise ApiError(400, f"the inputs have more than {MOST_TOKENS:,} tokens in all", "input")
        inputs.append(ids)
    return Embedding(model, request, inputs, served.pooling)


def check_dimensions(served: Served, dimensions: int | None) -> None:
    """ApiError for more dimensions than the model has."""
    most = served.engine.config.hidden_size
    if dimensions is not None and dimensions > most:
        raise ApiError(400, f"dimensions is {dimensions:,}: the model has {most:,}", "dimensions")
