"""Embeddings into a Longbow store, and the nearest texts to a question. Without an address a store in memory stands in.

python examples/longbow_search.py [MODEL [grpc://host:3000 grpc://host:3001]]
"""

from __future__ import annotations

import sys

import quarrel

try:
    from quarrel.flight import LongbowClient, vector_batch
    from quarrel.flight.local_server import LocalServer
except (ImportError, quarrel.QuarrelError) as error:
    sys.exit(f"needs pyarrow: pip install 'longbow-quarrel[flight]' ({error})")

TEXTS = ["The wind blew from the north.", "A king had three daughters.", "Bread and cheese lay upon the table."]
model, *addresses = sys.argv[1:] or ["demo"]

with LocalServer() as local, quarrel.load(model) as llm:
    data, meta = addresses or (local.data, local.meta)
    with LongbowClient(data=data, meta=meta) as store:
        made = llm.embed(TEXTS, pooling="mean")
        store.ingest("examples", vector_batch(range(len(TEXTS)), made.vectors, columns={"text": TEXTS}, normalize=True))
        store.wait_ready("examples", rows=len(TEXTS))
        question = llm.embed(["The queen had two daughters."], pooling="mean").vectors[0]
        hits = store.search("examples", question, k=2)
        for id, cosine in zip(hits.ids, hits.cosines, strict=True):
            print(f"{cosine:.3f}  {TEXTS[id]}")
        store.delete("examples")
