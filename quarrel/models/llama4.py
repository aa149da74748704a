"""llama4 (Scout, Maverick; MobileLLM): rope and chunks of keys in three layers, then one without positions whose queries
grow with theirs; one expert a token, weighted at its input, beside a shared one, in every n-th layer.

Query and key are normalised without gains after the rotation, which changes no length: it may as well be before. Not in
Maverick, which has 128 experts.
"""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.decoder import attentions, decoder, feed_forwards, slides, temperature
from quarrel.models.feedforward import Experts
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors

CHUNK, STRENGTH, MAVERICKS = 8192, 0.1, 128


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    """As in llama.cpp, a window of 0 in the file means neither chunks nor layers without positions."""
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "norm", c.head_dim, n_ctx)
    mixers = attentions(keys, c, rope)
    if chunk := keys.int("attention.sliding_window", CHUNK):
        near, growing = slides(keys, c.n_layers, 4), temperature(STRENGTH, chunk, c.context_length, 1)
        mixers = [
            replace(a, window=chunk, chunked=True) if close else replace(a, rope=None, temperature=growing)
            for a, close in zip(mixers, near)
        ]
    if keys.int("expert_count", 0) != MAVERICKS:
        mixers = [replace(a, unit_norm=a.rope is not None) for a in mixers]
    ffns = [
        replace(f, shared=f.width, renormalise=False, on_input=True) if isinstance(f, Experts) else f
        for f in feed_forwards(keys, c, "sigmoid")
    ]
    return decoder(keys, c, mixers, ffns)
