# SPDX-License-Identifier: Apache-2.0
"""The fields of beam search, under the names of vLLM and transformers."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from megatron.inference.server.beam_search import BeamSearchParams
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.body import MAX_OUTPUTS
from megatron.inference.server.protocol.generation import GenerationBody, TextFormat

#: Fields that beam search cannot serve, with the values that turn them off; every field may also be
#: absent. Beam search ranks outputs by the model's own log-probabilities and does not sample.
_OFF_VALUES: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "stop": ([],),
    "min_tokens": (0,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "echo": (False,),
}


class BeamSearchBody(GenerationBody):
    """A body of a route that offers beam search."""

    use_beam_search: bool = False
    """Returns the `n` outputs with the highest scores among `best_of` beams."""
    best_of: Annotated[int, Field(ge=1, le=MAX_OUTPUTS)] | None = None
    """Number of beams, at least `n`; without beam search only the value of `n`."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    """Exponent of the length that scores are divided by, 1 by default; with beam search only."""
    early_stopping: bool | Literal["never"] | None = None
    """When the search ends, as in transformers; with beam search only."""

    def beam_search_params(self) -> BeamSearchParams | None:
        """Return the parameters of beam search; None without beam search.

        Raises:
            ApiError: a field cannot be combined with beam search, or needs it.
        """
        n = self.n or 1
        if not self.use_beam_search:
            self._check_no_beam_search(n)
            return None
        for name, off_values in _OFF_VALUES.items():
            value = getattr(self, name, None)
            if value is not None and value not in off_values:
                raise ApiError(
                    400, f"{name} cannot be combined with use_beam_search: leave it out", param=name
                )
        if not isinstance(self.response_format, TextFormat | None):
            raise ApiError(
                400,
                "response_format cannot be combined with use_beam_search: leave it out",
                param="response_format",
            )
        width = self.best_of or n
        if width < n:
            raise ApiError(
                400, f"best_of is {width}: use at least n, which is {n}", param="best_of"
            )
        return BeamSearchParams(
            beam_width=width,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
        )

    def _check_no_beam_search(self, n: int) -> None:
        """Raise ApiError for a field of beam search that has an effect."""
        if self.best_of not in (None, n):
            raise ApiError(
                400,
                f"best_of is {self.best_of}: without use_beam_search this server returns all "
                "outputs: use n",
                param="best_of",
            )
        if self.early_stopping:
            raise ApiError(
                400, "early_stopping needs use_beam_search: true", param="early_stopping"
            )
        if self.length_penalty is not None and not math.isclose(self.length_penalty, 1):
            raise ApiError(
                400, "length_penalty needs use_beam_search: true", param="length_penalty"
            )
